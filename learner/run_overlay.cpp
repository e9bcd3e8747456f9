// Settings and broadcast figures of the overlay, for the service.
#include "learner/run_overlay.hpp"

#include <algorithm>

#include "base/secret.hpp"
#include "learner/external/node_calls.hpp"
#include "learner/planning.hpp"
#include "learner/submission_checker.hpp"
#include "overlay/sizes.hpp"
#include "provisioner/offer_links.hpp"

namespace echoline::learner {

Result<overlay::LearnerOptions> overlay_options(const RunConfig& config, const provisioner::Plan& plan,
                                                const std::filesystem::path& run_folder,
                                                std::optional<Version> resumed_at) {
  overlay::LearnerOptions options;
  options.network = config.network;
  options.uplink_expected = learner_upload_rate(config);
  const auto upload_rate_of = [&](const provisioner::PlanRow* row) {
    return provisioner::links_of(row->offer, config.fleet, config.paths).up;
  };
  if (config.paths.worker_rate)
    options.chain_rate = *config.paths.worker_rate;
  else if (const auto chosen = plan.chosen(); !chosen.empty())  // the slowest planned worker's, as in the plan
    options.chain_rate = upload_rate_of(*std::ranges::min_element(chosen, {}, upload_rate_of));
  if (config.network.topology != chains::TopologyPolicy::kAuto)
    options.policy = config.network.topology;
  else if (plan.topology.size() > 0)  // without a plan the fleet is unknown
    options.policy = plan.topology.policy;
  options.chooses_policy = config.network.topology == chains::TopologyPolicy::kAuto;
  constexpr int kHeartbeatsPerTimeout = 4;  // so that a lost heartbeat does not look like a lost worker
  options.heartbeat = std::min<Duration>(options.heartbeat, options.network.heartbeat_timeout / kHeartbeatsPerTimeout);
  options.away_max = config.fleet.away_max;
  ECHO_ASSIGN(const model::ModelConfig model, run_model_config(config));
  options.policy_bytes = model::memory_estimate(model).policy_bf16;
  options.regions = config.paths.regions.graph;
  options.run_id = config.run.name;
  options.folder = run_folder / "overlay";
  options.bundle = config.fleet.bundle.value_or(std::filesystem::path{});
  options.resumed_at = resumed_at;
  if (!config.network.relay.empty()) {
    ECHO_ASSIGN(std::string key, read_secret("ECHOLINE_RELAY_KEY", config.network.relay_key_file));
    options.relay_key = overlay::trust::Secret(std::move(key));
  }
  options.message_max =
      std::max(Bytes{kNodeMessageBytesMax},
               worker_message_max(model.positions_max, config.rollout.response_tokens_max, config.rollout.group_size,
                                  config.rollout.metadata_max, expert_choices_max(config, model)));
  return options;
}

nlohmann::json broadcast_row(const RunConfig& config, const overlay::BroadcastReport& report,
                             std::span<const chains::WorkerLink> links, BitRate nodes_up) {
  const BitRate learner_up{learner_upload_rate(config).bits_per_s + nodes_up.bits_per_s};
  const chains::Regions& regions = config.paths.regions.graph;
  constexpr double kShareMin = 1e-9;  // the formulas need a share above 0
  const double acknowledged_share =
      static_cast<double>(report.acknowledged) / static_cast<double>(std::max<std::size_t>(1, report.workers));
  // The share of workers that T_b (the broadcast time) counts; in a small fleet it may be less than the quorum.
  const double counted_share = std::clamp(acknowledged_share, kShareMin, config.network.quorum);
  nlohmann::json row = {
      {"version", report.version.value},
      {"snapshot", !report.base.has_value()},
      {"payload_bytes", report.payload.count},
      {"t_b_seconds", seconds(report.t_b)},
      {"workers", report.workers},
      {"acknowledged", report.acknowledged},
      {"depth", report.depth},
      {"chunk_bytes", report.chunk.count},
      {"learner_bytes", report.learner_bytes_sent.count},
      {"lower_bound_seconds", seconds(chains::lower_bound(report.payload, learner_up, links, counted_share, regions))}};
  const Bytes framed_payload = overlay::on_the_wire(report.payload, report.chunk);
  const Bytes framed_chunk = overlay::on_the_wire(report.chunk, report.chunk);
  const auto predicted =
      chains::broadcast_time(report.topology, framed_payload, framed_chunk, learner_up, links, regions);
  if (predicted) row["predicted_seconds"] = seconds(predicted->quorum_time(counted_share));
  const overlay::BroadcastParts& parts = report.parts;
  row["t_b_parts"] = {{"encode", seconds(parts.encode)},   {"seal", seconds(parts.seal)},
                      {"send", seconds(parts.send)},       {"verify", seconds(parts.verify)},
                      {"install", seconds(parts.install)}, {"acknowledge", seconds(parts.acknowledge)}};
  return row;
}

}  // namespace echoline::learner
