#!/usr/bin/env bash
# build_openssl.sh FOLDER: builds Debian 13's OpenSSL 3.5 into FOLDER, for this checkout alone, where that pays: OpenSSL
# has used AVX-512 for AES-GCM since 3.1, and Debian 12 has 3.0. Needs no root. Where it does not pay or cannot be had it
# says why, and the system's OpenSSL is used.
set -euo pipefail
folder=$1

leave() {
  echo "using the system's OpenSSL: $1"
  exit 0
}

if [ -e "$folder/lib/libssl.a" ]; then
  echo "built before, in $folder; remove it to build it anew"
  exit 0
fi
grep -qw avx512vl /proc/cpuinfo && grep -qw vaes /proc/cpuinfo || leave "this processor has no AES in AVX-512"
installed=$(pkg-config --modversion openssl)
[ "$(printf '%s\n' 3.1 "$installed" | sort -V | head -n 1)" != 3.1 ] || leave "it is $installed"
keys=/usr/share/keyrings/debian-archive-keyring.gpg
[ -e "$keys" ] && command -v apt-get dpkg-source > /dev/null || leave "no apt-get, dpkg-source or Debian's keys to get a newer one"

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
mkdir -p lists/partial cache/archives/partial source
cat > sources.list << END
deb-src [signed-by=$keys] http://deb.debian.org/debian trixie main
deb-src [signed-by=$keys] http://deb.debian.org/debian-security trixie-security main
END
# apt as it is for everybody, but with sources, lists and a cache of its own.
apt=(apt-get -qq -o Dir::Etc::sourcelist="$work/sources.list" -o Dir::Etc::sourceparts=-
  -o Dir::State::lists="$work/lists" -o Dir::Cache="$work/cache" -o APT::Sandbox::User=root)
cd source
"${apt[@]}" update && { "${apt[@]}" source openssl || "${apt[@]}" source openssl/trixie; } ||
  leave "the sources of a newer one did not come"
cd openssl-*/

# Of what is left out echoline uses nothing: TLS 1.3 over TCP is all it speaks.
{
  ./Configure --prefix="$folder" --libdir=lib no-shared no-tests no-apps no-docs no-legacy no-engine no-dso no-quic \
    no-dtls no-ssl3 no-tls1 no-tls1_1 no-autoload-config
  make -j"$(nproc)" build_libs
  make install_dev
} > build.log 2>&1 || {
  tail -n 20 build.log
  rm -rf "$folder"
  leave "the newer one could not be built"
}
echo "built OpenSSL $(sed -nE 's/^Version: //p' "$folder/lib/pkgconfig/openssl.pc") in $folder"
