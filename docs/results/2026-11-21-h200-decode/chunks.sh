g=./gqa
t() { $g profile $a 2>/dev/null | python3 -c "import json,sys; j=json.load(sys.stdin); print('%.1f'%j['graph_us'], end=' ')" 2>/dev/null || echo -n "- "; }
for b in 1 4 16; do for past in 1016 8184; do for q in 8 16 24 32 64 128; do
 a="--batch $b --heads 32 --kv-heads 8 --query-length $q --past-length $((past-q)) --packed --rotary half --runs 5 --json"
 echo -n "B$b past $past q $q: planned "; t; for k in decode_bf16_d128_r16 split_kv_bf16_d128 hopper_bf16_d128 tiled_bf16_d128; do echo -n " ${k%%_bf16*} "; GQA_FORCE=gqa_$k t; done; echo
done; done; done
