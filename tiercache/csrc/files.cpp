#include "files.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <mutex>
#include <set>

#include "errors.hpp"

namespace tiercache {
namespace {

std::mutex locks_mutex;
std::set<std::pair<std::uint64_t, std::uint64_t>>
    locks_held;  // device and inode of LOCK files of this process

}  // namespace

Fd::~Fd() {
  if (fd_ >= 0) close(fd_);
}

Fd open_directory(const std::string& path, bool create) {
  if (create && mkdir(path.c_str(), 0700) != 0 && errno != EEXIST) throw io_error("mkdir of " + path, errno);
  Fd made(open(path.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
  if (!made) {
    const int code = errno;
    if (code == ENOTDIR || code == ELOOP) {
      throw Error(ErrorKind::kConfig, "disk tier: " + path + " is not a directory", {}, {},
                  "name a directory of your own, not a file or symlink");
    }
    throw io_error("open of directory " + path, code);
  }
  struct stat status{};
  if (fstat(made.get(), &status) != 0) throw io_error("stat of " + path, errno);
  if (status.st_uid != geteuid() && status.st_uid != 0) {
    throw Error(ErrorKind::kConfig, "disk tier: " + path + " belongs to another user",
                std::to_string(status.st_uid), std::to_string(geteuid()), "name a directory of your own");
  }
  // Below a directory of ours nobody else makes files; in the one the user named, at least not in our place.
  const bool shared = (status.st_mode & S_IWOTH) != 0 && (status.st_mode & S_ISVTX) == 0;
  if (shared || (create && (status.st_mode & (S_IWGRP | S_IWOTH)) != 0)) {
    char mode[8];
    std::snprintf(mode, sizeof mode, "%04o", status.st_mode & 07777u);
    throw Error(ErrorKind::kConfig, "disk tier: others may write to " + path, mode, create ? "0700" : "0775",
                "look at what lies there, then chmod go-w it");
  }
  return made;
}

Fd open_file(int directory, const std::string& name, int flags, const std::string& shown) {
  Fd made(openat(directory, name.c_str(), flags | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK, 0600));
  if (!made) {
    const int code = errno;
    if (code == ELOOP) throw Error(ErrorKind::kCorrupt, shown + " is a symlink; it was not followed");
    throw io_error("open of " + shown, code);
  }
  struct stat status{};
  if (fstat(made.get(), &status) != 0) throw io_error("stat of " + shown, errno);
  if (!S_ISREG(status.st_mode)) throw Error(ErrorKind::kCorrupt, shown + " is not a regular file");
  if (status.st_uid != geteuid() && geteuid() != 0) {
    throw Error(ErrorKind::kCorrupt, shown + " belongs to another user", std::to_string(status.st_uid));
  }
  return made;
}

std::uint64_t file_size(int fd, const std::string& shown) {
  struct stat status{};
  if (fstat(fd, &status) != 0) throw io_error("stat of " + shown, errno);
  return static_cast<std::uint64_t>(status.st_size);
}

int read_full(int fd, void* data, std::size_t size, std::uint64_t offset) {
  auto* at = static_cast<char*>(data);
  while (size > 0) {
    const ssize_t done = pread(fd, at, size, static_cast<off_t>(offset));
    if (done < 0 && errno == EINTR) continue;
    if (done < 0) return errno;
    if (done == 0) return ENODATA;
    at += done;
    offset += static_cast<std::uint64_t>(done);
    size -= static_cast<std::size_t>(done);
  }
  return 0;
}

int write_full(int fd, const void* data, std::size_t size, std::uint64_t offset) {
  const auto* at = static_cast<const char*>(data);
  while (size > 0) {
    const ssize_t done = pwrite(fd, at, size, static_cast<off_t>(offset));
    if (done < 0 && errno == EINTR) continue;
    if (done < 0) return errno;
    if (done == 0) return EIO;
    at += done;
    offset += static_cast<std::uint64_t>(done);
    size -= static_cast<std::size_t>(done);
  }
  return 0;
}

int preallocate(int fd, std::uint64_t size) {
  int code = 0;
  do {
    code = fallocate(fd, 0, 0, static_cast<off_t>(size)) == 0 ? 0 : errno;
  } while (code == EINTR);
  if (code != EOPNOTSUPP && code != ENOSYS) return code;
  return ftruncate(fd, static_cast<off_t>(size)) == 0 ? 0 : errno;
}

WriterLock::WriterLock(int directory, const std::string& shown) : owner_(getpid()) {
  const std::lock_guard lock(locks_mutex);
  struct stat status{};
  // Before opening: closing any descriptor of the file would drop this process's lock on it.
  if (fstatat(directory, "LOCK", &status, AT_SYMLINK_NOFOLLOW) == 0) {
    identity_ = {status.st_dev, status.st_ino};
    if (locks_held.contains(identity_)) {
      throw Error(ErrorKind::kLocked, "disk tier: " + shown + " is open for writing already",
                  "pid " + std::to_string(owner_) + " (this process)", {}, "close the other store first");
    }
  }
  fd_ = open_file(directory, "LOCK", O_RDWR | O_CREAT, shown + "/LOCK");
  struct flock range{};
  range.l_type = F_WRLCK;
  range.l_whence = SEEK_SET;
  if (fcntl(fd_.get(), F_SETLK, &range) != 0) {
    const int code = errno;
    if (code != EACCES && code != EAGAIN) throw io_error("lock of " + shown + "/LOCK", code);
    struct flock holder = range;
    fcntl(fd_.get(), F_GETLK, &holder);
    throw Error(ErrorKind::kLocked, "disk tier: another process writes to " + shown,
                "pid " + std::to_string(holder.l_pid), {}, "end that process, or name another directory");
  }
  if (fstat(fd_.get(), &status) != 0) throw io_error("stat of " + shown + "/LOCK", errno);
  identity_ = {status.st_dev, status.st_ino};
  locks_held.insert(identity_);
}

WriterLock::~WriterLock() {
  if (getpid() != owner_ || !fd_) return;
  const std::lock_guard lock(locks_mutex);
  locks_held.erase(identity_);
  fd_ = Fd();
}

namespace {

struct flock range_of(short type, std::uint64_t offset, std::uint64_t length) {
  struct flock range{};
  range.l_type = type;
  range.l_whence = SEEK_SET;
  range.l_start = static_cast<off_t>(offset);
  range.l_len = static_cast<off_t>(length);
  return range;
}

}  // namespace

bool lock_range_shared(int fd, std::uint64_t offset, std::uint64_t length) {
  struct flock range = range_of(F_RDLCK, offset, length);
  return fcntl(fd, F_OFD_SETLK, &range) == 0;
}

void unlock_range(int fd, std::uint64_t offset, std::uint64_t length) {
  struct flock range = range_of(F_UNLCK, offset, length);
  fcntl(fd, F_OFD_SETLK, &range);
}

bool range_is_locked(int fd, std::uint64_t offset, std::uint64_t length) {
  struct flock range = range_of(F_WRLCK, offset, length);
  return fcntl(fd, F_OFD_GETLK, &range) == 0 && range.l_type != F_UNLCK;
}

}  // namespace tiercache
