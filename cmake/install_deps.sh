#!/usr/bin/env bash
# Installs the Debian 12 packages that echoline is built from and that are not there yet. --without-torch: those of a
# build with ECHOLINE_TORCH=OFF. --program: without those that only tests, benchmarks and examples need.
set -euo pipefail
export DEBIAN_FRONTEND=noninteractive

packages=(
  # tools
  g++ cmake ninja-build pkg-config ccache protobuf-compiler
  # learning plane
  libpcre2-dev libutf8proc-dev
  # network, storage, formats
  libuv1-dev libssl-dev libsqlite3-dev libzstd-dev libxxhash-dev libprotobuf-dev nlohmann-json3-dev libyaml-dev
  libcurl4-openssl-dev libcpp-httplib-dev  # providers and external trainers over HTTP
  librust-blake3-dev  # the C sources of BLAKE3
  libseccomp-dev bubblewrap  # programs that nobody trusts; a worker needs bubblewrap for tasks that run some
  # planning, program
  libboost-graph-dev libfmt-dev libspdlog-dev libcli11-dev
  libjs-chart.js  # plots of sweep.html and of echoline report --html
  zstd  # echoline bundle
)
tests=(libgtest-dev libgmock-dev libbenchmark-dev
  openssh-server  # for tests of providers
  codespell)  # for tests/structure/plain_words

case " $* " in *' --without-torch '*) ;; *)
  packages+=(libtorch-dev libopenblas-dev)
  tests+=(python3-torch python3-numpy) ;;  # examples/pytorch_grpo.py
esac
case " $* " in *' --program '*) ;; *) packages+=("${tests[@]}") ;; esac

if ! command -v dpkg-query > /dev/null; then
  echo "This is not a Debian system, so nothing is installed. Needed are the equivalents of: ${packages[*]}"
  exit 0
fi

missing=()
for package in "${packages[@]}"; do
  state=$(dpkg-query -W -f '${db:Status-Status}' "$package" 2> /dev/null) || state=
  [ "$state" = installed ] || missing+=("$package")
done
if [ ${#missing[@]} -eq 0 ]; then
  echo "all ${#packages[@]} packages are installed"
  exit 0
fi

as_root=()
if [ "$(id -u)" -ne 0 ]; then
  if ! command -v sudo > /dev/null || ! sudo -n true; then
    echo "root is needed to install packages; run this once: apt-get install ${missing[*]}"
    exit 1
  fi
  as_root=(sudo -n --preserve-env=DEBIAN_FRONTEND)
fi

install() { "${as_root[@]}" apt-get install -y --no-install-recommends "${missing[@]}"; }
echo "installing: ${missing[*]}"
# Package lists may be absent (a fresh image) or outdated; fetching them is the remedy for both.
install || { "${as_root[@]}" apt-get update && install; }
