# shellcheck shell=bash disable=SC2154
# Shared by quickstart and run_tests: runs the stages of a build quietly, each with its own log. Source it with
# `root` set to the checkout.
export DEBIAN_FRONTEND=noninteractive
program=$(basename "$0")
logs=$root/build/logs
mkdir -p "$logs"

# Ends with the one line that says what went wrong.
give_up() {
  echo "$program: $1" >&2
  exit 1
}

# Shows ninja's [done/total] on one line of a terminal; shows nothing elsewhere.
progress() {
  if [ -t 2 ]; then awk '/^\[[0-9]+\/[0-9]+\]/ { printf "\r    %s ", $1 > "/dev/stderr" }'; else cat > /dev/null; fi
}

# stage NAME COMMAND...: the output goes to build/logs/NAME.log.
stage() {
  local name=$1 log=$logs/$1.log status=0 start=$SECONDS
  shift
  echo "==> $name" >&2
  "$@" 2>&1 < /dev/null | tee "$log" | progress || status=$?
  if [ "$status" -ne 0 ]; then
    [ -z "${CI:-}" ] || tail -n 80 "$log" >&2 # a CI machine is gone before anyone can open the log
    give_up "the stage '$name' failed; see $log"
  fi
  printf '\r    done in %s s\n' $((SECONDS - start)) >&2
}

# build TARGET...: everything up to the built targets of the release preset; repeats only what changed. tests=OFF: a new
# build folder is made for one quick build without tests, and what only they need is not installed.
build() {
  local part=() options=(-DECHOLINE_TESTS=ON)
  if [ "${tests:-ON}" = OFF ]; then
    part=(--program) options=()
    [ -e "$root/build/release/CMakeCache.txt" ] || options=(-DECHOLINE_TESTS=OFF -DECHOLINE_QUICK=ON)
    grep -qs '^ECHOLINE_TESTS:BOOL=ON' "$root/build/release/CMakeCache.txt" && part=()
  fi
  stage dependencies bash "$root/cmake/install_deps.sh" "${part[@]}"
  stage configure cmake -S "$root" --preset release "${options[@]}"
  stage build cmake --build "$root/build/release" --parallel "$(nproc)" --target "$@"
}
