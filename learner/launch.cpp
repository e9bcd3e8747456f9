// The command line of a rented worker. RunFleet calls it for every machine.
#include "learner/launch.hpp"

#include <algorithm>

#include "learner/planning.hpp"
#include "overlay/uv/hosts.hpp"
#include "provisioner/host_script.hpp"
#include "provisioner/offer_links.hpp"
#include "provisioner/providers/registry.hpp"

namespace echoline::learner {
namespace {

std::vector<std::string> local_worker_arguments(const provisioner::Offer& offer, const RunConfig& config,
                                                const overlay::LearnerNode& node, const LocalWorkers& local) {
  const std::filesystem::path folder = std::filesystem::absolute(local.folder / offer.id);
  std::error_code ignored;
  std::filesystem::remove_all(folder, ignored);  // left by an earlier machine of this offer
  const auto [up, down] = provisioner::links_of(offer, config.fleet, config.paths);
  const auto rate_text = [](BitRate rate) { return fmt::format("{} bit/s", rate.bits_per_s); };
  return {local.program.string(),
          "worker",
          "--join",
          overlay::to_text(overlay::local_endpoint_of(node.endpoint())),
          "--name",
          offer.id,
          "--folder",
          folder.string(),
          "--up",
          rate_text(up),
          "--down",
          rate_text(down),
          "--rollouts-per-s",
          fmt::format("{}", offer.rollouts_per_s)};
}

// A service that maps its containers' ports limits the length of a command (4,096 characters), and not that of the
// environment. So a user's own text goes into the environment.
bool takes_short_commands(const provisioner::ProviderKind* kind) { return kind != nullptr && kind->mapped_port; }

}  // namespace

Result<provisioner::LaunchSpec> worker_launch_spec(const provisioner::Offer& offer, const RunConfig& config,
                                                   const overlay::LearnerNode& node, const LocalWorkers& local) {
  provisioner::LaunchSpec spec;
  spec.image = config.fleet.image;
  spec.disk = config.fleet.disk;
  const provisioner::ProviderKind* kind = provisioner::provider_kind(offer.provider);
  std::vector<std::string> engine_arguments =
      config.worker.arguments(/*with_engine_command=*/!takes_short_commands(kind));
  // The plan predicted the machine's speed with this number of engines, so the worker must start as many.
  if (config.worker.engine != "builtin")
    engine_arguments.insert(
        engine_arguments.end(),
        {"--engines", fmt::format("{}", std::max(1, config.worker.worker_engines().count_on(offer.gpu_count)))});
  // A local worker is a process of this machine; any other provider rents a host that must reach this learner.
  if (provisioner::is_local_provider(offer.provider)) {
    spec.argv = local_worker_arguments(offer, config, node, local);
    spec.argv.insert(spec.argv.end(), engine_arguments.begin(), engine_arguments.end());
  } else {
    const auto remote_endpoints = node.remote_endpoints();
    const std::string& bind = config.network.bind;
    if (remote_endpoints.empty() || (config.network.relay.empty() && overlay::is_loopback(bind)))
      return fail(Code::kInvalid, "network.bind",
                  "a host rented from '{}' cannot reach a learner that listens on {}: bind to an address that others "
                  "reach, or to '::', or set network.relay",
                  offer.provider, bind);
    // The host fetches the program in a bundle, or gets this program by ssh, or has it in its image.
    const std::string learner_endpoint = overlay::to_text(remote_endpoints.front());
    std::vector<std::string> arguments{
        "worker", "--join", learner_endpoint, "--name", offer.id, "--folder", "/var/tmp/echoline-" + offer.id,
        "--bind", "::"};
    arguments.insert(arguments.end(), engine_arguments.begin(), engine_arguments.end());
    // kSilenceMax is what a worker assumes without the argument.
    if (const Duration silence = config.fleet.silence_limit(); silence != provisioner::kSilenceMax)
      arguments.insert(arguments.end(), {"--silence-max", fmt::format("{:.0f} s", seconds(silence))});
    std::optional<provisioner::HostScript> script;
    if (const auto& bundle = node.bundle())
      script = provisioner::HostScript{.learner = learner_endpoint,
                                       .sha256 = bundle->sha256,
                                       .key_pin = bundle->key_pin,
                                       .authority = bundle->authority,
                                       .name = config.network.relay.empty() ? "" : node.relay_name()};
    provisioner::set_worker_command(spec, offer.provider, script, std::move(arguments));
  }
  // The token is valid for as long as the run waits for the machine, because loading images and bundles takes time.
  const Duration start_limit =
      config.fleet.queue_timeout + config.fleet.start_limit(kind != nullptr && kind->reports_phases);
  ECHO_ASSIGN(const auto token, node.issue_token(offer.id, std::max(overlay::trust::kTokenLifetime, start_limit)));
  spec.env = {{kTokenVariable, std::string(token.reveal())}};
  if (takes_short_commands(kind) && !config.worker.engine_command.empty())
    spec.env.emplace_back(kEngineCommandVariable, config.worker.engine_command);
  // A rented container sees only the GPUs of its offer. A process on a host would see all of the host's.
  const bool is_host = provisioner::is_local_provider(offer.provider) || (kind != nullptr && kind->is_bare_host);
  const bool uses_offered_gpus = config.worker.engine != "builtin" || config.worker.device == "cuda";
  if (is_host && uses_offered_gpus && !offer.gpu_ids.empty())
    spec.env.emplace_back("CUDA_VISIBLE_DEVICES", fmt::format("{}", fmt::join(offer.gpu_ids, ",")));
  return spec;
}

}  // namespace echoline::learner
