// File descriptors, and opening files that others may have tampered with.
#pragma once
#include <sys/types.h>

#include <cstdint>
#include <string>
#include <utility>

namespace tiercache {

class Fd {
 public:
  Fd() = default;
  explicit Fd(int fd) : fd_(fd) {}
  Fd(Fd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Fd& operator=(Fd&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~Fd();
  int get() const noexcept { return fd_; }
  explicit operator bool() const noexcept { return fd_ >= 0; }

 private:
  int fd_ = -1;
};

// A directory, never through a symlink, owned by this user or root, in which nobody else can put files in the
// place of ours. `create`: one of our own, made with mode 0700 when missing, which only this user may write
// to. Throws kConfig when it is something else, kIo when the system refuses.
Fd open_directory(const std::string& path, bool create);

// A regular file below `directory`, never through a symlink, owned by this user, mode 0600 when made. `flags`
// are open(2)'s. Throws kIo or, for what is no regular file of ours, kCorrupt.
Fd open_file(int directory, const std::string& name, int flags, const std::string& shown);

std::uint64_t file_size(int fd, const std::string& shown);

// Reads or writes the whole range, over short transfers and interrupts. Returns 0, an errno, or ENODATA at
// the end of the file.
int read_full(int fd, void* data, std::size_t size, std::uint64_t offset);
int write_full(int fd, const void* data, std::size_t size, std::uint64_t offset);

// Room for [0, size) with real blocks behind it; 0 or an errno. Falls back to a sparse file where the file
// system can't preallocate.
int preallocate(int fd, std::uint64_t size);

// The store's writer lock on `directory`/LOCK: a POSIX record lock, which the kernel drops at any end of the
// process and a forked child doesn't inherit. A second lock in one process is refused as well.
class WriterLock {
 public:
  // Throws kLocked with the pid of the holder.
  WriterLock(int directory, const std::string& shown);
  ~WriterLock();
  WriterLock(const WriterLock&) = delete;
  WriterLock& operator=(const WriterLock&) = delete;

 private:
  Fd fd_;
  std::pair<std::uint64_t, std::uint64_t> identity_{};
  int owner_ = 0;
};

// Open-file-description locks on a byte range of a segment: a reader's lease.
bool lock_range_shared(int fd, std::uint64_t offset, std::uint64_t length);
void unlock_range(int fd, std::uint64_t offset, std::uint64_t length);
// True when another description holds any lock there.
bool range_is_locked(int fd, std::uint64_t offset, std::uint64_t length);

}  // namespace tiercache
