// The authority of a run as files, run.key and run.crt: Authority::open() and open_or_create(), for learners.
#include <fcntl.h>
#include <openssl/crypto.h>
#include <openssl/err.h>
#include <openssl/pem.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>

#include "base/files.hpp"
#include "overlay/trust/openssl.hpp"
#include "overlay/trust/secret.hpp"

namespace echoline::overlay::trust {
namespace {

namespace fs = std::filesystem;
constexpr std::string_view kOperation = "open run authority";
constexpr std::size_t kPemBytesMax = 64 * 1024;

BioPtr memory_bio() {
  BioPtr bio(BIO_new(BIO_s_mem()));
  ECHO_CHECK(bio != nullptr, "{}", openssl_error());
  return bio;
}

std::string content(BIO& bio) {
  char* data = nullptr;
  const long size = BIO_get_mem_data(&bio, &data);
  return std::string(data, static_cast<std::size_t>(size));
}

std::string certificate_pem(const Authority& authority) {
  const BioPtr bio = memory_bio();
  const CertificatePtr x509 = parse_certificate(authority.certificate());
  ECHO_CHECK(x509 && PEM_write_bio_X509(bio.get(), x509.get()) == 1, "{}", openssl_error());
  return content(*bio);
}

// OpenSSL overwrites the memory of the BIO when it is freed.
Secret key_and_certificate_pem(const Authority& authority) {
  const BioPtr bio = memory_bio();
  EVP_PKEY* key = authority.key().parsed().key.get();
  ECHO_CHECK(PEM_write_bio_PrivateKey(bio.get(), key, nullptr, nullptr, 0, nullptr, nullptr) == 1, "{}",
             openssl_error());
  const std::string certificate = certificate_pem(authority);
  ECHO_CHECK(BIO_write(bio.get(), certificate.data(), static_cast<int>(certificate.size())) > 0);
  return Secret(content(*bio));
}

// Writes a file that only the owner may read, unless the file exists already. Either way, a complete file is on disk
// afterwards.
Status write_private_once(const fs::path& path, std::string_view text) {
  constexpr std::string_view kWriteOperation = "write run authority";
  std::string temporary = (path.parent_path() / ("." + path.filename().string() + ".XXXXXX")).string();
  const Descriptor fd(::mkostemp(temporary.data(), O_CLOEXEC));  // mode 0600
  if (fd.get() < 0) return os_error(kWriteOperation, path);
  const bool written =
      ::write(fd.get(), text.data(), text.size()) == static_cast<ssize_t>(text.size()) && ::fsync(fd.get()) == 0;
  // Unlike rename(), link() never replaces a file.
  const bool file_exists = written && (::link(temporary.c_str(), path.c_str()) == 0 || errno == EEXIST);
  const Error error = os_error(kWriteOperation, path);  // before unlink() changes errno
  ::unlink(temporary.c_str());
  if (!file_exists) return error;
  const Descriptor folder(::open(path.parent_path().c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (folder.get() < 0 || ::fsync(folder.get()) != 0) return os_error(kWriteOperation, path.parent_path());
  return ok();
}

std::optional<SigningKey> to_signing_key(EVP_PKEY& key) {
  SigningKey::Seed seed;
  std::size_t size = seed.size();
  if (EVP_PKEY_get_id(&key) != EVP_PKEY_ED25519 ||
      EVP_PKEY_get_raw_private_key(&key, reinterpret_cast<unsigned char*>(seed.data()), &size) != 1)
    return std::nullopt;
  const SigningKey signing(seed);
  OPENSSL_cleanse(seed.data(), seed.size());
  return signing;
}

Result<Authority> read_key(const fs::path& path, const std::string& run_id) {
  struct stat info {};
  if (::lstat(path.c_str(), &info) != 0) return os_error(kOperation, path);
  if (!S_ISREG(info.st_mode)) return fail(Code::kInvalid, kOperation, "{}: expected a plain file", path.string());
  if (info.st_mode & 077)
    return fail(Code::kInvalid, kOperation,
                "{}: expected a file that only its owner can read (mode 600), found mode {:o}: "
                "any user with access can join the run; chmod 600 it, or start a new run",
                path.string(), info.st_mode & 0777);
  ECHO_ASSIGN(std::string text, read_file(path, kPemBytesMax));
  const Secret pem(std::move(text));
  const BioPtr bio(BIO_new_mem_buf(pem.reveal().data(), static_cast<int>(pem.reveal().size())));
  // Without this callback, OpenSSL would ask the terminal for a password.
  const auto no_password = [](char*, int, int, void*) { return -1; };
  const KeyPtr key(PEM_read_bio_PrivateKey(bio.get(), nullptr, no_password, nullptr));
  const CertificatePtr certificate(key ? PEM_read_bio_X509(bio.get(), nullptr, nullptr, nullptr) : nullptr);
  const std::optional<SigningKey> signing = key ? to_signing_key(*key) : std::nullopt;
  const Result<AuthorityInfo> stored = certificate
                                           ? read_authority(*certificate)
                                           : Result<AuthorityInfo>(fail(Code::kCorrupt, kOperation, "no certificate"));
  ERR_clear_error();
  if (!signing || !stored)
    return fail(Code::kCorrupt, kOperation,
                "{}: expected an Ed25519 key and its certificate (PEM), found something else or a part: restore the "
                "file, or remove it and start a new run",
                path.string());
  if (stored->run_id != run_id)
    return fail(Code::kInvalid, kOperation, "{}: expected the key of run '{}', found that of run '{}'", path.string(),
                run_id, stored->run_id);
  // The certificate follows from run id and key, so it can be made again and compared.
  ECHO_ASSIGN(Authority authority, Authority::create(run_id, *signing));
  if (to_der(*certificate) != authority.certificate())
    return fail(Code::kCorrupt, kOperation, "{}: the certificate does not belong to the key", path.string());
  return authority;
}

// Writes run.crt if it is missing. A different one means that files of different runs were mixed.
Status write_or_check_certificate(const fs::path& path, const Authority& authority) {
  const std::string expected = certificate_pem(authority);
  const auto found = read_file(path, kPemBytesMax);
  if (!found && found.error().code == Code::kNotFound) return write_file_atomic(path, expected);
  if (!found) return found.error();
  if (*found != expected)
    return fail(Code::kCorrupt, kOperation,
                "{}: expected the certificate in run.key, found something else: remove it to have "
                "it written again",
                path.string());
  return ok();
}

}  // namespace

Result<Authority> Authority::open(const fs::path& folder, std::string run_id) {
  return read_key(folder / "run.key", run_id);
}

Result<Authority> Authority::open_or_create(const fs::path& folder, std::string run_id) {
  ECHO_TRY(make_folders(folder));
  const fs::path key_path = folder / "run.key";
  Result<Authority> authority = read_key(key_path, run_id);
  if (!authority && authority.error().code == Code::kNotFound) {
    ECHO_ASSIGN(const Authority fresh, create(run_id, SigningKey::generate()));
    ECHO_TRY(write_private_once(key_path, key_and_certificate_pem(fresh).reveal()));
    authority = read_key(key_path, run_id);  // another process may have written the file first: its key counts
  }
  if (!authority) return authority;
  ECHO_TRY(write_or_check_certificate(folder / "run.crt", *authority));
  return authority;
}

}  // namespace echoline::overlay::trust
