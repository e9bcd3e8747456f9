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

}  // namespace

Result<provisioner::LaunchSpec> worker_launch_spec(const provisioner::Offer& offer, const RunConfig& config,
                                                   const overlay::LearnerNode& node, const LocalWorkers& local) {
  provisioner::LaunchSpec spec;
  spec.image = config.fleet.image;
  spec.disk = config.fleet.disk;
  std::vector<std::string> engine_arguments = config.worker.arguments();
  // The number for which the plan pays.
  if (config.worker.engine != "builtin")
    engine_arguments.insert(
        engine_arguments.end(),
        {"--engines", fmt::format("{}", std::max(1, config.worker.on_machine().count_on(offer.gpu_count)))});
  // A local worker is a process of this machine; any other provider rents a host that must reach this learner.
  if (provisioner::is_local_provider(offer.provider)) {
    spec.argv = local_worker_arguments(offer, config, node, local);
    spec.argv.insert(spec.argv.end(), engine_arguments.begin(), engine_arguments.end());
  } else {
    const auto remote_endpoints = overlay::remote_endpoints_of(node.endpoint());
    const std::string& bind = config.network.bind;
    if (remote_endpoints.empty() || overlay::is_loopback(bind))
      return fail(Code::kInvalid, "network.bind",
                  "a host rented from '{}' cannot reach a learner that listens on {}: bind to an address that others "
                  "reach, or to '::'",
                  offer.provider, bind);
    // The host fetches the program in a bundle, or gets this program by ssh, or has it in its image.
    const std::string learner_endpoint = overlay::to_text(remote_endpoints.front());
    std::vector<std::string> arguments{
        "worker", "--join", learner_endpoint, "--name", offer.id, "--folder", "/var/tmp/echoline-" + offer.id,
        "--bind", "::"};
    arguments.insert(arguments.end(), engine_arguments.begin(), engine_arguments.end());
    if (const Duration silence = config.fleet.silence_limit(); silence != provisioner::kSilenceMax)
      arguments.insert(arguments.end(), {"--silence-max", fmt::format("{:.0f} s", seconds(silence))});
    std::optional<provisioner::HostScript> script;
    if (const auto& bundle = node.bundle())
      script = provisioner::HostScript{.learner = learner_endpoint,
                                       .sha256 = bundle->sha256,
                                       .key_pin = bundle->key_pin,
                                       .authority = bundle->authority};
    provisioner::set_worker_command(spec, offer.provider, script, std::move(arguments));
  }
  // The token is valid for as long as the run waits for the machine, because loading images and bundles takes time.
  const provisioner::ProviderKind* kind = provisioner::provider_kind(offer.provider);
  const Duration start_limit =
      config.fleet.queue_timeout + config.fleet.start_limit(kind != nullptr && kind->reports_phases);
  ECHO_ASSIGN(const auto token, node.issue_token(offer.id, std::max(overlay::trust::kTokenLifetime, start_limit)));
  spec.env = {{kTokenVariable, std::string(token.reveal())}};
  // A rented container has no other GPUs than its offer's. A host has them all.
  const bool is_host = provisioner::is_local_provider(offer.provider) || (kind != nullptr && kind->is_bare_host);
  const bool uses_offered_gpus = config.worker.engine != "builtin" || config.worker.device == "cuda";
  if (is_host && uses_offered_gpus && !offer.gpu_ids.empty())
    spec.env.emplace_back("CUDA_VISIBLE_DEVICES", fmt::format("{}", fmt::join(offer.gpu_ids, ",")));
  return spec;
}

}  // namespace echoline::learner
