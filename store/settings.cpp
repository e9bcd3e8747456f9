// The keys of the section `store`.
#include "store/settings.hpp"

#include "base/config.hpp"

namespace echoline::store {

void read(ConfigSection section, StoreSettings& settings) {
  section.read("url", settings.address.url,
               {"where the learner keeps every published version: s3://BUCKET/PREFIX, or a folder. Credentials come "
                "from the environment or AWS's profile file, never from here",
                "no store"});
  section.read("endpoint", settings.address.endpoint,
               {"address of an S3-compatible service, such as https://minio.example:9000", "AWS"});
  section.read("region", settings.address.region,
               {"region in the signature of requests; `auto` for Cloudflare R2",
                "AWS_REGION, or that of the profile, "
                "or us-east-1"});
  section.read("profile", settings.address.profile,
               {"section of the profile file with the access key", "the keys in the environment, or AWS_PROFILE"});
  section.read("anchor_every", settings.anchor_every, {.min = 1, .max = 100'000},
               "deltas from one whole snapshot (anchor) to the next");
  section.read("deltas_kept", settings.retention.deltas_kept, {.min = 1, .max = 100'000},
               "newest deltas that are kept, with all that they need");
  section.read("anchors_kept", settings.retention.anchors_kept, {.min = 1, .max = 100'000},
               "newest anchors that are kept");
  section.read("lease", settings.lease, {.min = std::chrono::seconds(5), .max = std::chrono::minutes(10)},
               "time without a sign of life after which another learner may publish to this prefix");
  section.read("backlog_max", settings.backlog_max, {.min = Bytes{1'000'000}},
               "bytes on the learner's disk of versions that wait for their upload. Beyond this, versions are left out "
               "of the store until there is room, and the next stored one is an anchor");
}

}  // namespace echoline::store
