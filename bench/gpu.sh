#!/usr/bin/env bash
# What docs/results has of a GPU, from a program built elsewhere: bench/gpu.sh GQA FOLDER [PART…]
# All parts without a part, in the order of the list below. Each ends by itself after the time that it is given, and leaves its log,
# JSON, CSV, figures and report in FOLDER. Python needs torch, for ort onnxruntime-gpu and onnx; ncu is used where it is installed.
set -u
parts=(tokens prompts attention steps sizes errors masked operator ort blocks float8 chunks models profile counters)
[ $# -ge 2 ] || { echo "arguments: got $#; allowed: GQA FOLDER [PART…], a part is one of ${parts[*]}" >&2; exit 2; }
gqa=$(realpath "$1"); out=$2; shift 2
for each in "$@"; do
  [[ " ${parts[*]} " == *" $each "* ]] || { echo "part: got $each; allowed: ${parts[*]}" >&2; exit 2; }
done
mkdir -p "$out"; out=$(realpath "$out"); here=$(dirname "$(realpath "$0")")
failed=0

# part SECONDS NAME COMMAND…: with its output in NAME.log and its last lines shown
part() {
  local seconds=$1 name=$2; shift 2
  echo "== $name: $*"
  timeout "$seconds" "$@" >"$out/$name.log" 2>&1 || { failed=$((failed + 1)); echo "FAILED: $name"; }
  tail -n 20 "$out/$name.log"
}

# compared MODE NAME HEADS/KVxSIZE SIZES: peers and gqa in turn, then tables and figures beside them; alone where there are none
compared() {
  local heads=${3%%/*} rest=${3#*/} against=()
  part 170 "$2-peers" python3 "$here/peers.py" "$1" --heads "$3" --size "$4" --gqa "$gqa" --out "$out/$2-peers.json" \
    --peers "FlashAttention-3; cuDNN; FlashAttention-2"
  [ -s "$out/$2-peers.json" ] && against=(--against "$out/$2-peers.json")
  part 90 "$2" "$gqa" bench "$1" --heads "$heads" --kv-heads "${rest%x*}" --head-size "${rest#*x}" --size "$4" \
    "${against[@]}" --csv "$out/$2.csv" --plots "$out/$2" --report "$out/$2.html"
}

tokens() { compared decode tokens 32/8x128 1x1024,1x8192,1x32768,8x8192,32x2048,32x8192; }
prompts() { compared prefill prompts 32/8x128 32x512,8x2048,2x8192,1x16384; }
# Attention alone, in one process with peers: prompts, tokens, further head sizes and a window.
peers=(python3 "$here/peers.py") ours=(--cached --gqa "$gqa" --peers "FlashAttention-3; cuDNN")
attention() {
  local heads=32/8x128,64/8x128,32/8x64,16/4x256
  part 170 attention "${peers[@]}" prefill "${ours[@]}" --rounds 5 --replays 5 --heads $heads --size 32x512,8x2048,2x8192,1x16384 --out "$out/attention.json"
  part 170 attention-bidirectional "${peers[@]}" prefill "${ours[@]}" --rounds 5 --replays 5 --heads $heads --size 2x8192,1x16384 --bidirectional \
    --out "$out/attention-bidirectional.json"
}
steps() {
  local sizes=1x1024,1x8192,1x32768,1x131072,8x8192,8x32768,32x2048,32x8192
  part 170 attention-tokens "${peers[@]}" decode "${ours[@]}" --prefetch-cache --heads 32/8x128,64/8x128,64/8x64,8/1x128 --size $sizes --out "$out/attention-tokens.json"
  part 120 attention-tokens-128 "${peers[@]}" decode "${ours[@]}" --prefetch-cache --heads 32/8x128,64/8x128,64/8x64 --size 128x2048,128x8192 --out "$out/attention-tokens-128.json"
}
sizes() {
  local heads=32/8x80,32/8x96,32/8x128,32/8x160,16/4x192,16/4x224,16/4x256
  part 170 attention-sizes "${peers[@]}" prefill "${ours[@]}" --rounds 3 --replays 5 --heads $heads --size 32x512,8x2048,2x8192 --out "$out/attention-sizes.json"
  part 40 attention-window "${peers[@]}" prefill "${ours[@]}" --rounds 3 --replays 5 --size 1x16384 --window 1024 --out "$out/attention-window.json"
}
errors() { for size in 64 128 256; do part 60 errors-$size python3 "$here/errors.py" --gqa "$gqa" --head-size $size; done; }
# With a bias or a mask, beside PyTorch.
masked() { part 120 masked python3 "$here/masked.py" --gqa "$gqa"; }
# Whole calls with rotary embedding, beside ONNX Runtime's in one process.
ort() { part 170 ort python3 "$here/ort_cuda.py" --gqa "$gqa" --out "$out/ort.json"; }
# Over caches of blocks, beside FlashAttention-3's.
blocks() { for size in 64 128 256; do part 120 blocks-$size python3 "$here/blocks.py" --gqa "$gqa" --heads 32/8x$size; done; }
# Over a cache of float8, in products of it, beside FlashAttention-3's.
float8() {
  part 120 float8 python3 "$here/float8.py" --gqa "$gqa" --rounds 5
  part 60 float8-bidirectional python3 "$here/float8.py" --gqa "$gqa" --rounds 5 --bidirectional --size 2x8192,1x16384
}
# Whole calls without blocks, and more of them, alone.
operator() {
  local call=(bench decode --packed --rotary half --checked-rows 4)
  part 60 operator-tokens "$gqa" "${call[@]}" --size 1x1024,1x8192,1x32768,8x8192,32x2048,32x8192,128x2048 --csv "$out/operator-tokens.csv"
  part 60 operator-tokens-prefetch "$gqa" "${call[@]}" --prefetch-cache --size 1x1024,1x8192,1x32768,8x8192,32x2048,32x8192,128x2048 --csv "$out/operator-tokens-prefetch.csv"
  part 20 operator-token-mqa "$gqa" "${call[@]}" --heads 8 --kv-heads 1 --size 1x8192,1x131072
  part 20 operator-token-64 "$gqa" "${call[@]}" --heads 64 --head-size 64 --size 1x8192
  call=(bench prefill --rotary half --checked-rows 4)
  part 60 operator-prompts "$gqa" "${call[@]}" --size 32x512,8x2048,2x8192,1x16384 --csv "$out/operator-prompts.csv"
  part 30 operator-prompt-packed "$gqa" "${call[@]}" --packed --size 1x16384
  part 30 operator-prompt-64 "$gqa" "${call[@]}" --head-size 64 --size 32x512,8x2048,2x8192
  part 30 operator-prompt-256 "$gqa" "${call[@]}" --heads 16 --kv-heads 4 --head-size 256 --size 32x512,2x8192
}
chunks() { part 60 chunks "$gqa" bench prefill --past-length 7680 --size 1x512,4x512 --rotary half --csv "$out/chunks.csv"; }
models() {
  local all=llama3-8b,llama3-70b,qwen3-14b,mistral-7b,mixtral-8x22b,phi3-mini,phi3-small,phi3-medium,gemma4-global,gemma4-local
  part 170 models-token "$gqa" bench decode --model $all --batch 1,8 --length 1024,8191 --runs 10 --checked-rows 4 \
    --csv "$out/models-token.csv" --report "$out/models-token.html"
  part 170 models-prompt "$gqa" bench prefill --model $all --length 1024,8192 --runs 10 --checked-rows 4 \
    --csv "$out/models-prompt.csv" --report "$out/models-prompt.html"
}

# Calls whose launches are timed and counted: a prompt, a chunk, a token of one sequence and of many.
calls=("prompt --batch 2 --query-length 8192" "chunk --query-length 512 --past-length 7680"
  "token --past-length 8191 --packed --rotary half" "tokens --batch 32 --past-length 8191 --packed --rotary half")
profile() { for call in "${calls[@]}"; do part 60 "profile-${call%% *}" "$gqa" profile ${call#* }; done; }
counters() {
  command -v ncu >/dev/null || { echo "== counters: left out, as there is no ncu"; return; }
  for call in "${calls[@]}"; do
    local line
    line=$("$gqa" profile ${call#* } --runs 1 --json | python3 -c 'import json, sys; print(json.load(sys.stdin)["ncu"])') || line=false
    part 90 "counters-${call%% *}" bash -c "$line"
  done
}

nvidia-smi >"$out/nvidia-smi.log" 2>&1
[ $# -gt 0 ] || set -- "${parts[@]}"
for each in "$@"; do "$each"; done
echo "$failed parts failed"
exit "$failed"
