g=./gqa
for b in 1 8; do for past in 1016 8184; do for heads in 32 64; do for q in 1 2 3 4 6 8; do
 a="--batch $b --heads $heads --kv-heads 8 --query-length $q --past-length $past --packed --rotary half --runs 20 --json"
 d=$($g profile $a 2>/dev/null | python3 -c "import json,sys; j=json.load(sys.stdin); print('%.2f'%j['graph_us'] if 'graph_us' in j else list(j.keys()), [l['entry'] for l in j['launches']])")
 f=$(GQA_FORCE=gqa_decode_bf16_d128_r16 $g profile $a 2>/dev/null | python3 -c "import json,sys; j=json.load(sys.stdin); print('%.2f'%j['graph_us'], [(l['entry'],l['grid'][0]) for l in j['launches']])" 2>&1 | tail -n 1)
 echo "B$b past $past heads $heads q $q: $d | r16 $f"
done; done; done; done
