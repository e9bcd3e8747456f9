// Builds the seccomp filter with libseccomp.
#include "data_plane/sandbox/filter.hpp"

#include <sched.h>
#include <seccomp.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <memory>

#include "base/files.hpp"

namespace echoline::sandbox {
namespace {

// These calls fail with EPERM. They are listed by name, because libseccomp's header may lack constants of calls that
// the kernel has. A newer call that is not listed here needs privileges that the sandbox does not grant.
constexpr const char* kRefusedCalls[] = {
    // other processes
    "ptrace", "process_vm_readv", "process_vm_writev", "process_madvise", "kcmp", "pidfd_getfd", "move_pages",
    "migrate_pages",
    // namespaces and mounts
    "unshare", "setns", "mount", "umount", "umount2", "pivot_root", "chroot", "fsopen", "fsconfig", "fsmount", "fspick",
    "open_tree", "move_mount", "mount_setattr", "name_to_handle_at", "open_by_handle_at", "fanotify_init",
    "fanotify_mark",
    // keys, kernel interfaces
    "keyctl", "add_key", "request_key", "bpf", "perf_event_open", "userfaultfd", "lookup_dcookie", "syslog", "acct",
    "quotactl", "quotactl_fd", "init_module", "finit_module", "delete_module", "create_module", "get_kernel_syms",
    "query_module", "kexec_load", "kexec_file_load", "reboot", "swapon", "swapoff", "nfsservctl", "sysfs", "_sysctl",
    "uselib", "vserver", "bdflush",
    // devices, clocks, names
    "iopl", "ioperm", "modify_ldt", "vm86", "vm86old", "settimeofday", "clock_settime", "clock_settime64", "stime",
    "adjtimex", "clock_adjtime", "clock_adjtime64", "sethostname", "setdomainname", "vhangup",
    // memory that belongs to no process
    "shmget", "msgget", "semget", "mq_open", "memfd_secret"};

// These calls fail with ENOSYS, as if the kernel lacked them, because programs then have a fallback. clone3's flags are
// in memory, where the filter cannot see them.
constexpr const char* kAbsentCalls[] = {"clone3", "memfd_create", "io_uring_setup", "io_uring_enter",
                                        "io_uring_register"};

constexpr unsigned long kNamespaceFlags =
    CLONE_NEWNS | CLONE_NEWCGROUP | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNET;

struct Release {
  void operator()(scmp_filter_ctx context) const { seccomp_release(context); }
};

// Adds a rule for the system call `name`. Returns 0 or libseccomp's error. A call that this architecture lacks needs no
// rule.
int add_rule(scmp_filter_ctx context, std::uint32_t action, const char* name) {
  const int number = seccomp_syscall_resolve_name(name);
  if (number == __NR_SCMP_ERROR) return 0;
  const int added = seccomp_rule_add(context, action, number, 0);
  return added == -EDOM ? 0 : added;
}

// The condition of a rule on the argument `index` of a call, counted from 0. With SCMP_CMP_MASKED_EQ, `value` is a mask
// and the condition is (argument & value) == masked_value.
scmp_arg_cmp argument(unsigned index, scmp_compare comparison, scmp_datum_t value, scmp_datum_t masked_value = 0) {
  return {.arg = index, .op = comparison, .datum_a = value, .datum_b = masked_value};
}

// Adds all rules. Returns 0 or libseccomp's first error.
int add_rules(scmp_filter_ctx context) {
  const auto refused = SCMP_ACT_ERRNO(EPERM), absent = SCMP_ACT_ERRNO(ENOSYS);
  int error = 0;
  const auto keep_first_error = [&](int result) { error = error != 0 ? error : result; };
  for (const char* name : kRefusedCalls) keep_first_error(add_rule(context, refused, name));
  for (const char* name : kAbsentCalls) keep_first_error(add_rule(context, absent, name));
  for (unsigned flag = 1; flag != 0; flag <<= 1)
    if (kNamespaceFlags & flag)
      keep_first_error(
          seccomp_rule_add(context, refused, SCMP_SYS(clone), 1, argument(0, SCMP_CMP_MASKED_EQ, flag, flag)));
  // The request of ioctl() is 32 bits of a 64-bit register; the kernel ignores the other half.
  for (const unsigned long request : {TIOCSTI, TIOCLINUX})
    keep_first_error(
        seccomp_rule_add(context, refused, SCMP_SYS(ioctl), 1, argument(1, SCMP_CMP_MASKED_EQ, 0xffffffffu, request)));
  for (const int call : {SCMP_SYS(socket), SCMP_SYS(socketpair)})
    keep_first_error(seccomp_rule_add(context, refused, call, 1, argument(0, SCMP_CMP_NE, AF_UNIX)));
  // Shared anonymous memory outlives the process that filled it, so no process would be charged for it.
  constexpr unsigned kSharedAnonymous = MAP_SHARED | MAP_ANONYMOUS;
  keep_first_error(seccomp_rule_add(context, refused, SCMP_SYS(mmap), 1,
                                    argument(3, SCMP_CMP_MASKED_EQ, kSharedAnonymous, kSharedAnonymous)));
  return error;
}

}  // namespace

Result<std::string> system_call_filter() {
  constexpr std::string_view kOperation = "make a system call filter";
  const std::unique_ptr<void, Release> context(seccomp_init(SCMP_ACT_ALLOW));
  if (!context) return fail(Code::kUnavailable, kOperation, "libseccomp cannot make one on this machine");
  int error = seccomp_attr_set(context.get(), SCMP_FLTATR_ACT_BADARCH, SCMP_ACT_KILL_PROCESS);
  if (error == 0) error = add_rules(context.get());
  const Descriptor file(::memfd_create("filter", MFD_CLOEXEC));
  if (error == 0) error = seccomp_export_bpf(context.get(), file.get());
  if (error != 0) return fail(Code::kUnavailable, kOperation, "libseccomp: {}", std::strerror(-error));
  std::string filter(static_cast<std::size_t>(std::max<off_t>(0, ::lseek(file.get(), 0, SEEK_END))), '\0');
  if (filter.empty() || ::pread(file.get(), filter.data(), filter.size(), 0) != static_cast<ssize_t>(filter.size()))
    return fail(Code::kIo, kOperation, "the filter cannot be read back");
  return filter;
}

}  // namespace echoline::sandbox
