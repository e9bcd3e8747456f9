// The command of a rented host: fetches the bundle and starts the worker.
#include "provisioner/host_script.hpp"

#include <fmt/format.h>

#include "provisioner/providers/registry.hpp"

namespace echoline::provisioner {
namespace {

// The script fetches the bundle, checks its digest, unpacks it and starts the program. host_command() adds lines at its
// start, which set the HostScript's fields as learner, sum, pin and ca, and lines between its two parts, with which
// die() ends the instance. The script must be short, because a provider may accept only a few thousand characters. It
// passes the token by stdin, environment or a file of mode 600, because all users of a machine can see arguments; so
// auth() prints the header with the token as a line of curl's configuration.
constexpr const char* kScriptUntilEnd = R"sh(umask 077
url=https://$learner/bundle new=
has() { command -v "$1" >/dev/null 2>&1; }
auth() { printf '%s"Authorization: Bearer %s"\n' "$1" "$2"; }
die() {
  echo "echoline: $*" >&2
  [ -z "$new" ] || rm -rf "$new"
)sh";
constexpr const char* kScriptAfterEnd = R"sh(  exit 1
}
fetch() {
  if has curl; then
    code=$(auth header= "$ECHOLINE_TOKEN" |
    curl -qsSkK- $relay --pinnedpubkey "$pin" --connect-timeout 20 -y600 -Y1 -o "$1" -w '%{http_code}' "$url") &&
    [ "$code" = 200 ]
  elif has wget; then
    printf 'header=Authorization: Bearer %s\n' "$ECHOLINE_TOKEN" >"$1.rc"
    wget -nv -t1 -T600 --config="$1.rc" --no-check-certificate --pinnedpubkey="$pin" --content-on-error -O "$1" "$url"
  else
    python3 -c 'import base64,http.client as h,os,shutil,ssl,sys
a,ca,f=sys.argv[1:]
c=ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
c.check_hostname=False
c.load_verify_locations(cadata=base64.b64decode(ca))
s=h.HTTPSConnection(a,context=c,timeout=600)
s.connect()
if ("commonName","learner") not in sum(s.sock.getpeercert()["subject"],()): sys.exit("not the learner")
s.request("GET","/bundle",headers={"Authorization":"Bearer "+os.environ["ECHOLINE_TOKEN"]})
r=s.getresponse()
with open(f,"wb") as o: shutil.copyfileobj(r,o)
sys.exit(r.status!=200 or r.length>0)' "$learner" "$ca" "$1"
  fi
}
base=${XDG_CACHE_HOME:-${HOME:-/root}/.cache}/echoline
mkdir -p "$base" 2>/dev/null && [ -O "$base" ] || base=$(mktemp -d) || die "no folder for the bundle"
home=$base/$sum
if [ ! -x "$home/bin/echoline" ]; then
  has curl || { [ ! "$relay" ] && { has wget || has python3; }; } ||
    { apt-get -qq update && apt-get -qqy --no-install-recommends install curl; } >&2 ||
    die "this machine has none of curl, wget and python3, and curl cannot be installed"
  new=$(mktemp -d "$base/new.XXXXXX") || die "$base: not writable"
  n=1
  until fetch "$new/bundle"; do
    [ ! -s "$new/bundle" ] || [ "$(head -c 8 "$new/bundle")" != refused: ] || die "$(cat "$new/bundle")"
    [ $n -lt 3 ] || die "$url: the bundle could not be fetched"
    sleep $((n * 5)); n=$((n + 1))
  done
  got=$(sha256sum <"$new/bundle"); got=${got%% *}
  [ "$got" = "$sum" ] || die "the bundle has digest $got, expected $sum: it is not used"
  tar xf "$new/bundle" -C "$new" || die "the bundle cannot be unpacked (without zstd and xz, it must be a .tar.gz)"
  [ -d "$home" ] || mv -T "$new/echoline-worker" "$home" || [ -d "$home" ] || die "$home: not writable"
  rm -rf "$new"
fi
exec "$home/bin/echoline" "$@"
)sh";

}  // namespace

void set_worker_command(LaunchSpec& spec, std::string_view provider, const std::optional<HostScript>& script,
                        std::vector<std::string> arguments) {
  if (const ProviderKind* kind = provider_kind(provider); kind && kind->mapped_port) {
    spec.ports = {kMappedPort};
    arguments.insert(arguments.end(), {"--port", std::to_string(kMappedPort)});
  }
  spec.program_on_instance = script.has_value();
  if (!script) arguments.insert(arguments.begin(), "echoline");
  spec.argv = script ? host_command(*script, provider, arguments) : std::move(arguments);
}

std::vector<std::string> host_command(const HostScript& script, std::string_view provider,
                                      const std::vector<std::string>& arguments) {
  // A relay finds the run by the name in the URL. Only curl can dial another address than that of the name.
  std::string learner = script.learner, relay;
  if (!script.name.empty()) {
    learner = script.name + script.learner.substr(script.learner.rfind(':'));
    relay = fmt::format("'--connect-to ::{}'", script.learner);
  }
  const std::string variables = fmt::format("relay={} learner={} sum={} pin={} ca={}\n", relay, learner, script.sha256,
                                            script.key_pin, script.authority);
  const std::string text = variables + kScriptUntilEnd + end_own_instance_script(provider) + kScriptAfterEnd;
  std::vector<std::string> argv{"sh", "-c", text, "echoline"};  // "echoline" becomes $0
  argv.insert(argv.end(), arguments.begin(), arguments.end());
  return argv;
}

}  // namespace echoline::provisioner
