// Consequences of what workers report about each other, and of how much they send. conduct.hpp has the rules.
#include <algorithm>

#include "base/log.hpp"
#include "overlay/learner/learner_core.hpp"

namespace echoline::overlay {

// ---- message budgets ----

// Whether the message is within the sender's budget. A sender with too many messages beyond it is expelled, which
// destroys its Worker.
bool LearnerCore::within_budget(WorkerId id, MessageBudget::Kind kind, TimePoint now, std::size_t bytes) {
  MessageBudget& budget = conduct_.record_of(id, unix_ms(now)).budget;
  switch (budget.count(kind, now, bytes)) {
    case MessageBudget::Verdict::kAccept:
      return true;
    case MessageBudget::Verdict::kDrop:
      return false;
    case MessageBudget::Verdict::kTooMuch:
      break;
  }
  if (!workers_.is_known(id)) return false;
  conduct_.count_flood();
  expel(id, "it says too much: of " + budget.describe(kind), now);
  return false;
}

// The message is dropped and counted. A broken driver may be the cause.
void LearnerCore::on_malformed(WorkerId id, const std::string& what, TimePoint now) {
  if (!workers_.is_known(id)) return;
  log::warn("worker {}: {}", id, what);
  if (conduct_.count_malformed(id, unix_ms(now))) return expel(id, what + ", as often as never happens by chance", now);
  save(now);
}

// The worker accuses another worker that never sent it anything.
void LearnerCore::on_unfounded_accusation(Worker& accuser, WorkerId accused, TimePoint now) {
  const WorkerId id = accuser.view.info.id;
  if (conduct_.record_of(id, unix_ms(now)).budget.count_unfounded_accusation(now) == MessageBudget::Verdict::kTooMuch)
    expel(id, fmt::format("it accuses workers that never sent it anything, the last one worker {}", accused), now);
}

// ---- failed edges ----

// The edge failed although both ends live. If it cannot be opened, the ends try in turns. A parent that is silent to
// its child and to the learner loses its place. A parent that is silent to several children has a slow uplink.
// Otherwise the two are separated after the third time, and a worker that fails with several other workers loses a
// role.
void LearnerCore::on_edge_failed(Worker& child, const EdgeFailed& failed, TimePoint now) {
  const WorkerId id = child.view.info.id;
  Worker* const parent = workers_.find(failed.parent);
  const Parent* const edge = child.place.edge_from(failed.parent);
  if (!child.place.may_accuse(failed.parent, now)) return on_unfounded_accusation(child, failed.parent, now);
  if (!parent || !edge) return;  // the parent has left or was replaced meanwhile
  log::warn("worker {} lost the connection to its parent {}: {}", id, failed.parent, failed.reason);
  // If the learner has not heard the parent for two heartbeats either, the parent may be silent to all nodes.
  if (failed.kind == EdgeTroubleKind::kSilent && now > parent->presence.last_frame_at() + 2 * config_.heartbeat) {
    parent->presence.on_complaint(now);
    if (parent->presence.is_silent_to_child(config_, now))
      mark_silent(failed.parent, "it is silent to its child and to the learner", now);
    return;
  }
  if (failed.kind == EdgeTroubleKind::kUnreachable) {
    test_reachability(*parent, now);
    if (pass_dial_turn(child, *parent, now)) return;
  }
  if (failed.kind == EdgeTroubleKind::kSilent && !conduct_.is_quarantined(id, unix_ms(now))) {
    const bool is_silent_to_several = slow_hops_.is_silent_to_several(failed.parent, id, now);
    const auto planned = planned_rate(*edge, child, topology().copies_sent_by(failed.parent));
    if (is_silent_to_several && planned)  // nothing arrives: the rate is 0
      return on_slow_hop(
          {.hop = {.from = failed.parent, .to = id}, .rate = BitRate{0}, .expected = *planned, .others_keep_up = false},
          now);
  }
  const Conduct::Ruling ruling = conduct_.on_edge_failed(id, failed.parent, now, unix_ms(now));
  const bool parent_redials = ruling == Conduct::Ruling::kNothing && reach_.parent_dials(failed.parent, id);
  if (parent_redials && failed.kind != EdgeTroubleKind::kUnreachable && reach_.claim_dial(child.view.info.data, now))
    send_control(parent->control, DialChild{id, child.view.info.data}, now);  // opens the connection again
  apply_ruling(id, failed.parent, ruling, now);
}

// One end could not open the edge, so the other end dials. Returns whether that is the parent's first attempt: then the
// edge does not count as failed yet.
bool LearnerCore::pass_dial_turn(Worker& child, const Worker& parent, TimePoint now) {
  const MemberInfo& info = child.view.info;
  const WorkerId parent_id = parent.view.info.id;
  const Reachability::Turn turn = reach_.pass_dial_turn(parent_id, info.id, info.data, now);
  if (!turn.changed) return false;
  for (Parent& edge : child.place.assigned->parents)
    if (edge.worker == parent_id) edge.dials = turn.parent_dials;
  if (turn.parent_dials) send_control(parent.control, DialChild{info.id, info.data}, now);
  send_control(child.control, *child.place.assigned, now);
  return turn.first_failure && turn.parent_dials;
}

void LearnerCore::apply_ruling(WorkerId child, WorkerId parent, Conduct::Ruling ruling, TimePoint now) {
  switch (ruling) {
    case Conduct::Ruling::kNothing:
      return;
    case Conduct::Ruling::kSeparate:
      return separate(child, parent, now);
    case Conduct::Ruling::kParentAtFault:
      log::warn("worker {} is moved behind the others: it failed to forward", parent);
      return move_behind_others(parent, now);
    case Conduct::Ruling::kChildAtFault:
      log::warn("worker {} is moved behind the others: its edges fail with every parent", child);
      return move_behind_others(child, now);
  }
}

// ---- stalls ----

// Whether a parent reports chunks that this child lacks and should get over their edge.
bool LearnerCore::is_ahead_of(const Parent& parent, const Worker& child) const {
  const Worker* sender = workers_.find(parent.worker);
  if (!sender || sender->presence.is_silent()) return false;
  // The parent holds the child's next delta, of which the child has not even received the announcement.
  const auto is_unknown_to_child = [&](const auto& holding) {
    const PublicationKey& key = holding.first;
    const StoredPublication* stored = key.base && key.base == child.view.installed ? store_.find(key) : nullptr;
    return stored && !child.reported.progress.contains(stored->id);
  };
  if (std::any_of(sender->reported.holdings.begin(), sender->reported.holdings.end(), is_unknown_to_child)) return true;
  return std::any_of(child.reported.progress.begin(), child.reported.progress.end(), [&](const auto& entry) {
    const auto& [publication, chunks_at_child] = entry;
    const StoredPublication* stored = store_.find(publication);
    if (!stored || stored->key().version <= child.view.installed) return false;
    if (chunks_at_child.size() != topology().stripes()) return false;
    const auto progress = sender->reported.progress.find(publication);
    const bool parent_has_all = sender->view.installed >= stored->key().version;
    if (!parent_has_all && progress == sender->reported.progress.end()) return false;
    const auto chunks_at_parent = parent_has_all ? chunks_by_stripe(*stored) : progress->second;
    for (std::uint32_t stripe = 0; stripe < std::min(chunks_at_child.size(), chunks_at_parent.size()); ++stripe)
      if ((parent.stripe_mask >> stripe & 1) && chunks_at_parent[stripe] > chunks_at_child[stripe]) return true;
    return false;
  });
}

// Nothing useful has come to the child for long. That counts as a failed edge with the helper, or with each parent that
// reports chunks which the child lacks. None of these becomes a helper now, because help would hide the failing edge.
void LearnerCore::on_stalled(Worker& child, TimePoint now) {
  const WorkerId id = child.view.info.id;
  std::vector<WorkerId> idle_senders;
  const auto helper = helpers_.helper_of(id);
  if (helper && *helper != kLearnerId) {
    idle_senders.push_back(*helper);
  } else if (!helper) {
    for (const Parent& edge : child.place.parents())
      if (edge.worker != kLearnerId && is_ahead_of(edge, child)) idle_senders.push_back(edge.worker);
  }
  for (const WorkerId parent : idle_senders) {
    log::warn("worker {} has received nothing useful for long from its {} {}", id, helper ? "helper" : "parent",
              parent);
    helpers_.exclude(id, parent);
    apply_ruling(id, parent, conduct_.on_edge_failed(id, parent, now, unix_ms(now), Conduct::kStallWeight), now);
  }
}

// ---- bad chunks ----

// The child says that a chunk's proof failed: then the parent has not checked the chunk, or has changed it.
void LearnerCore::on_poisoned(Worker& child, const Poisoned& poisoned, TimePoint now) {
  const WorkerId accuser = child.view.info.id;
  if (!child.place.may_accuse(poisoned.parent, now)) return on_unfounded_accusation(child, poisoned.parent, now);
  if (poisoned.parent == kLearnerId) return;
  log::warn("worker {} -> {}: bad chunk {}", poisoned.parent, accuser, poisoned.index);
  const auto is_connected = [this](WorkerId id) { return workers_.contains(id); };
  switch (conduct_.on_bad_chunk(accuser, poisoned.parent, unix_ms(now), is_connected)) {
    case Conduct::Ruling::kNothing:
      return;
    case Conduct::Ruling::kSeparate:
      return separate(accuser, poisoned.parent, now);
    case Conduct::Ruling::kParentAtFault:
      return on_quarantined(poisoned.parent, "several workers got bad chunks from it", now);
    case Conduct::Ruling::kChildAtFault:
      return on_quarantined(accuser, "it accuses many workers of bad chunks, and no other worker accuses them", now);
  }
}

// Either of the two may be at fault, so neither is blamed. Planning the topology again keeps them apart.
void LearnerCore::separate(WorkerId child, WorkerId parent, TimePoint now) {
  log::warn("workers {} and {} get no common edge any more: one accuses the other, without proof", parent, child);
  set_topology(plan_.workers_topology(), now);
  save(now);
}

void LearnerCore::on_quarantined(WorkerId id, const std::string& why, TimePoint now) {
  log::warn("worker {} is quarantined, it forwards nothing any more: {}", id, why);
  save(now);
  if (workers_.contains(id)) move_behind_others(id, now);
}

// ---- periodic checks ----

void LearnerCore::check_conduct(TimePoint now) {
  std::vector<WorkerId> may_forward_again;
  for (const auto& [id, worker] : workers_)
    if (conduct_.take_retry(id, unix_ms(now))) may_forward_again.push_back(id);
  for (const WorkerId id : may_forward_again) move_behind_others(id, now);
  if (!conduct_.take_prune(now)) return;
  const auto present = workers_.all_ids();
  conduct_.prune({present.begin(), present.end()}, unix_ms(now));
}

// A worker regains a role by deliveries to other workers.
void LearnerCore::credit_delivery(WorkerId sender, WorkerId receiver, TimePoint now) {
  if (sender == kLearnerId || !conduct_.on_delivery(sender, receiver, unix_ms(now))) return;
  const auto& leaves = topology().leaves_only;
  if (workers_.contains(sender) && std::binary_search(leaves.begin(), leaves.end(), sender))
    move_behind_others(sender, now);  // it may forward again
}

}  // namespace echoline::overlay
