#!/usr/bin/env bash
# Measures on a GPU machine with a program built elsewhere: bench/gpu.sh GQA FOLDER [PART…]
# Without a part all parts run, in the order of the list below. Each has a time limit and writes its
# log, JSON, CSV, figures and report to FOLDER. Python needs torch, and for ort onnxruntime-gpu and
# onnx; counters needs ncu.
set -u
parts=(decode prefill attention steps sizes errors masked operator ort blocks float8 chunks models
  profile counters)
[ $# -ge 2 ] || {
  echo "arguments: got $#; allowed: GQA FOLDER [PART…], a part is one of ${parts[*]}" >&2
  exit 2
}
gqa=$(realpath "$1"); out=$2; shift 2
for each in "$@"; do
  [[ " ${parts[*]} " == *" $each "* ]] || {
    echo "part: got $each; allowed: ${parts[*]}" >&2
    exit 2
  }
done
mkdir -p "$out"; out=$(realpath "$out"); here=$(dirname "$(realpath "$0")")
failed=0

# part SECONDS NAME COMMAND…: logs to NAME.log and shows the last lines
part() {
  local seconds=$1 name=$2; shift 2
  echo "== $name: $*"
  timeout "$seconds" "$@" >"$out/$name.log" 2>&1 \
    || { failed=$((failed + 1)); echo "FAILED: $name"; }
  tail -n 20 "$out/$name.log"
}

# compared MODE HEADS/KVxSIZE SIZES: times the peers and gqa, then makes gqa's tables and figures,
# with the peers' times if there are any
compared() {
  local heads=${2%%/*} rest=${2#*/} against=()
  part 170 "$1-peers" python3 "$here/peers.py" "$1" --heads "$2" --size "$3" --gqa "$gqa" \
    --out "$out/$1-peers.json" --peers "FlashAttention-3; cuDNN; FlashAttention-2"
  [ -s "$out/$1-peers.json" ] && against=(--against "$out/$1-peers.json")
  part 90 "$1" "$gqa" bench "$1" --heads "$heads" --kv-heads "${rest%x*}" \
    --head-size "${rest#*x}" --size "$3" "${against[@]}" \
    --csv "$out/$1.csv" --plots "$out/$1" --report "$out/$1.html"
}

decode() { compared decode 32/8x128 1x1024,1x8192,1x32768,8x8192,32x2048,32x8192; }
prefill() { compared prefill 32/8x128 32x512,8x2048,2x8192,1x16384; }

# attention_alone SECONDS NAME MODE OPTIONS…: in one process with the peers
attention_alone() {
  local seconds=$1 name=$2 mode=$3; shift 3
  part "$seconds" "$name" python3 "$here/peers.py" "$mode" --cached --gqa "$gqa" \
    --peers "FlashAttention-3; cuDNN" "$@" --out "$out/$name.json"
}
# Prefill.
attention() {
  local options=(--rounds 5 --replays 5 --heads 32/8x128,64/8x128,32/8x64,16/4x256)
  attention_alone 170 attention prefill "${options[@]}" --size 32x512,8x2048,2x8192,1x16384
  attention_alone 170 attention-bidirectional prefill "${options[@]}" --size 2x8192,1x16384 \
    --bidirectional
}
# Decode.
steps() {
  local sizes=1x1024,1x8192,1x32768,1x131072,8x8192,8x32768,32x2048,32x8192
  attention_alone 170 attention-decode decode --prefetch-cache \
    --heads 32/8x128,64/8x128,64/8x64,8/1x128 --size $sizes
  attention_alone 120 attention-decode-128 decode --prefetch-cache \
    --heads 32/8x128,64/8x128,64/8x64 --size 128x2048,128x8192
}
# Further head sizes, and a window.
sizes() {
  local heads=32/8x80,32/8x96,32/8x128,32/8x160,16/4x192,16/4x224,16/4x256
  attention_alone 170 attention-sizes prefill --rounds 3 --replays 5 --heads $heads \
    --size 32x512,8x2048,2x8192
  attention_alone 40 attention-window prefill --rounds 3 --replays 5 --size 1x16384 --window 1024
}
errors() {
  for size in 64 128 256; do
    part 60 errors-$size python3 "$here/errors.py" --gqa "$gqa" --head-size $size
  done
}
# With a bias or a mask, beside PyTorch.
masked() { part 120 masked python3 "$here/masked.py" --gqa "$gqa"; }
# Whole calls with RoPE, in one process with ONNX Runtime.
ort() { part 170 ort python3 "$here/ort_cuda.py" --gqa "$gqa" --out "$out/ort.json"; }
# Over a paged KV cache, beside FlashAttention-3.
blocks() {
  for size in 64 128 256; do
    part 120 blocks-$size python3 "$here/blocks.py" --gqa "$gqa" --heads 32/8x$size
  done
}
# Products in float8 over a float8 cache, beside FlashAttention-3.
float8() {
  part 120 float8 python3 "$here/float8.py" --gqa "$gqa" --rounds 5
  part 60 float8-bidirectional python3 "$here/float8.py" --gqa "$gqa" --rounds 5 --bidirectional \
    --size 2x8192,1x16384
}
# Whole calls over contiguous KV caches, without peers.
operator() {
  local call=("$gqa" bench decode --packed --rotary half --checked-rows 4)
  local sizes=1x1024,1x8192,1x32768,8x8192,32x2048,32x8192,128x2048
  part 60 operator-decode "${call[@]}" --size $sizes --csv "$out/operator-decode.csv"
  part 60 operator-decode-prefetch "${call[@]}" --prefetch-cache --size $sizes \
    --csv "$out/operator-decode-prefetch.csv"
  part 20 operator-decode-mqa "${call[@]}" --heads 8 --kv-heads 1 --size 1x8192,1x131072
  part 20 operator-decode-64 "${call[@]}" --heads 64 --head-size 64 --size 1x8192
  call=("$gqa" bench prefill --rotary half --checked-rows 4)
  part 60 operator-prefill "${call[@]}" --size 32x512,8x2048,2x8192,1x16384 \
    --csv "$out/operator-prefill.csv"
  part 30 operator-prefill-packed "${call[@]}" --packed --size 1x16384
  part 30 operator-prefill-64 "${call[@]}" --head-size 64 --size 32x512,8x2048,2x8192
  part 30 operator-prefill-256 "${call[@]}" --heads 16 --kv-heads 4 --head-size 256 \
    --size 32x512,2x8192
}
chunks() {
  part 60 chunks "$gqa" bench prefill --past-length 7680 --size 1x512,4x512 --rotary half \
    --csv "$out/chunks.csv"
}
models() {
  local all=llama3-8b,llama3-70b,qwen3-14b,mistral-7b,mixtral-8x22b
  all+=,phi3-mini,phi3-small,phi3-medium,gemma4-global,gemma4-local
  local options=(--model $all --runs 10 --checked-rows 4)
  part 170 models-decode "$gqa" bench decode "${options[@]}" --batch 1,8 --length 1024,8191 \
    --csv "$out/models-decode.csv" --report "$out/models-decode.html"
  part 170 models-prefill "$gqa" bench prefill "${options[@]}" --length 1024,8192 \
    --csv "$out/models-prefill.csv" --report "$out/models-prefill.html"
}

# The calls of profile and counters, each with its name.
calls=("prefill --batch 2 --query-length 8192"
  "chunk --query-length 512 --past-length 7680"
  "decode --past-length 8191 --packed --rotary half"
  "decode-32 --batch 32 --past-length 8191 --packed --rotary half")
profile() {
  for call in "${calls[@]}"; do part 60 "profile-${call%% *}" "$gqa" profile ${call#* }; done
}
counters() {
  command -v ncu >/dev/null || { echo "== counters: skipped, ncu is not installed"; return; }
  for call in "${calls[@]}"; do
    local line
    line=$("$gqa" profile ${call#* } --runs 1 --json \
      | python3 -c 'import json, sys; print(json.load(sys.stdin)["ncu"])') || line=false
    part 90 "counters-${call%% *}" bash -c "$line"
  done
}

nvidia-smi >"$out/nvidia-smi.log" 2>&1
[ $# -gt 0 ] || set -- "${parts[@]}"
for each in "$@"; do "$each"; done
echo "$failed parts failed"
exit "$failed"
