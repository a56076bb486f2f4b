// The part of Segments that makes, opens and removes files.
#include <dirent.h>
#include <fcntl.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <cstring>
#include <functional>

#include "aligned.hpp"
#include "errors.hpp"
#include "segments.hpp"

namespace tiercache {
namespace {

// Left free on the file system when files grow: the index must be able to say what was deleted.
constexpr std::uint64_t kHeadroom = 1 << 20;

std::string name_of(std::uint32_t id) {
  char text[24];
  std::snprintf(text, sizeof text, "%04u.seg", id);
  return text;
}

// The number in "0042.seg"; 0 for any other name.
std::uint32_t id_of(const std::string& name) {
  const auto dot = name.find('.');
  if (dot == std::string::npos || dot == 0 || dot > 9 || name.substr(dot) != ".seg") return 0;
  if (!std::all_of(name.begin(), name.begin() + static_cast<std::ptrdiff_t>(dot),
                   [](char c) { return std::isdigit(static_cast<unsigned char>(c)) != 0; })) {
    return 0;
  }
  const auto id = static_cast<std::uint32_t>(std::stoul(name.substr(0, dot)));
  return name == name_of(id) ? id : 0;
}

bool has_room(int directory, std::uint64_t size) {
  struct statvfs status{};
  if (fstatvfs(directory, &status) != 0) return true;  // the allocation will tell
  return status.f_bavail * status.f_frsize >= size + kHeadroom;
}

bool all_zero(const SegmentHeader& header) {
  static constexpr SegmentHeader kZero{};
  return std::memcmp(&header, &kZero, sizeof header) == 0;
}

}  // namespace

std::vector<std::string> Segments::open_existing(bool keep) {
  std::vector<std::string> refused;
  for (std::uint32_t drive = 0; drive < drives_.size(); ++drive) {
    std::vector<std::string> names;
    const std::unique_ptr<DIR, int (*)(DIR*)> listing(fdopendir(dup(drives_[drive].fd.get())), closedir);
    if (!listing) throw io_error("listing of " + drives_[drive].path, errno);
    rewinddir(listing.get());
    while (const dirent* entry = readdir(listing.get())) {
      const std::string name = entry->d_name;
      if (name != "." && name != "..") names.push_back(name);
    }
    std::ranges::sort(names, std::greater{});  // the newest first, for as far as the budget goes
    for (const std::string& name : names) open_one(drive, name, keep, refused);
  }
  return refused;
}

void Segments::open_one(std::uint32_t drive, const std::string& name, bool keep,
                        std::vector<std::string>& refused) {
  DriveDir& home = drives_[drive];
  const std::string shown = home.path + "/" + name;
  if (name == name_of(0)) {  // a probe that a crash left behind
    unlinkat(home.fd.get(), name.c_str(), 0);
    return;
  }
  const std::uint32_t id = id_of(name);
  if (id == 0) {
    throw Error(ErrorKind::kCorrupt, "disk tier: " + shown + " is no segment file", {}, {},
                "move it away: nothing but segments may lie here");
  }
  Fd fd = open_file(home.fd.get(), name, O_RDWR, shown);
  const std::uint64_t size = file_size(fd.get(), shown);
  const AlignedMemory block(kBlock);
  auto& header = *reinterpret_cast<SegmentHeader*>(block.data());
  const int code = read_full(fd.get(), &header, sizeof header, 0);
  next_id_ = std::max(next_id_, id + 1);
  std::string reason = code != 0 ? std::string("unreadable header: ") + std::strerror(code)
                                 : refuse_segment(header, options_.uuid, id, size);
  if (reason.empty() && (header.drive != drive || segments_.contains(id)))
    reason = "segment of another drive";
  // A file whose header was never written is what a crash between two steps of create() leaves.
  const bool unborn = (code == 0 && all_zero(header)) || size < 2 * kBlock;
  if (unborn || (reason.empty() && !keep)) {
    unlinkat(home.fd.get(), name.c_str(), 0);
    ++removed_;
    return;
  }
  if (!reason.empty()) {
    refused.push_back(shown + ": " + reason);
    refused_.emplace_back(drive, name);
    return;
  }
  if (size > options_.capacity_bytes - std::min(allocated_, options_.capacity_bytes)) {
    refused.push_back(shown + ": removed with its records, for the budget is smaller than it was");
    unlinkat(home.fd.get(), name.c_str(), 0);
    ++removed_;
    return;
  }
  auto segment = std::make_shared<Segment>();
  segment->id = id;
  segment->drive = drive;
  segment->epoch = header.epoch;
  segment->size = size;
  segment->path = shown;
  if (home.direct) {
    Fd direct(openat(home.fd.get(), name.c_str(), O_RDWR | O_DIRECT | O_NOFOLLOW | O_CLOEXEC));
    if (direct) fd = std::move(direct);
  }
  segment->fd = std::move(fd);
  segment->free.release(kBlock, size - kBlock);
  allocated_ += size;
  home.bytes += size;
  segments_.emplace(id, std::move(segment));
}

// Size of the next file: whole records of this length where they are large, so that little is left over.
std::uint64_t Segments::growth(std::uint64_t length, std::uint64_t limit) const {
  const std::uint64_t need = length + kBlock;
  std::uint64_t size = options_.segment_bytes;
  if (need > size) {
    size = need;
  } else if (length > (size - kBlock) / 8) {
    size = kBlock + (size - kBlock) / length * length;
  }
  return std::min(size, limit) >= need ? std::min(size, limit) : 0;
}

bool Segments::grow(std::uint32_t drive, std::uint64_t length) {
  const std::lock_guard growing(grow_mutex_);
  std::uint64_t size = 0;
  std::uint32_t id = 0;
  {
    const std::lock_guard lock(mutex_);
    // Another thread may have grown meanwhile.
    for (const auto& [other, segment] : segments_) {
      if (segment->drive == drive && !segment->quarantined && segment->free.largest() >= length) return true;
    }
    if (drives_[drive].full_until > std::chrono::steady_clock::now()) return false;
    const std::uint64_t left = options_.capacity_bytes - std::min(allocated_, options_.capacity_bytes);
    size = growth(length, left);
    if (size == 0) size = growth(length, left + remove_empty(length + kBlock));
    if (size == 0) return false;
    allocated_ += size;
    id = next_id_++;
  }
  int code = 0;
  SegmentPtr made;
  for (std::uint64_t smaller = size; smaller >= length + kBlock; smaller = smaller / 2 / kBlock * kBlock) {
    made = create(drive, id, smaller, code);
    if (made || (code != ENOSPC && code != EDQUOT)) break;
    if (smaller > length + kBlock && smaller / 2 < length + kBlock) smaller = 2 * (length + kBlock);
  }
  const std::lock_guard lock(mutex_);
  allocated_ -= size;
  if (!made) {
    ++growth_refused_;
    drives_[drive].full_until = std::chrono::steady_clock::now() + std::chrono::milliseconds(500);
    if (code != ENOSPC && code != EDQUOT && ++drives_[drive].errors >= options_.max_errors)
      drives_[drive].off = true;
    return false;
  }
  allocated_ += made->size;
  drives_[drive].bytes += made->size;
  segments_.emplace(id, std::move(made));
  return true;
}

SegmentPtr Segments::create(std::uint32_t drive, std::uint32_t id, std::uint64_t size, int& code) {
  const DriveDir& home = drives_[drive];
  if (!has_room(home.fd.get(), size)) {
    code = ENOSPC;
    return nullptr;
  }
  const std::string name = name_of(id);
  const int flags = O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC;
  Fd fd(openat(home.fd.get(), name.c_str(), flags | (home.direct ? O_DIRECT : 0), 0600));
  if (!fd) {
    code = errno;
    return nullptr;
  }
  const AlignedMemory block(kBlock);
  auto& header = *new (block.data()) SegmentHeader;
  header.uuid = options_.uuid;
  header.epoch = options_.epoch;
  header.size = size;
  header.segment = id;
  header.drive = drive;
  seal(header);
  code = preallocate(fd.get(), size);
  if (code == 0) code = write_full(fd.get(), &header, sizeof header, 0);
  if (code == 0 && options_.sync_metadata && (fsync(fd.get()) != 0 || fsync(home.fd.get()) != 0))
    code = errno;
  if (code != 0) {
    unlinkat(home.fd.get(), name.c_str(), 0);
    return nullptr;
  }
  auto segment = std::make_shared<Segment>();
  segment->id = id;
  segment->drive = drive;
  segment->epoch = options_.epoch;
  segment->size = size;
  segment->path = home.path + "/" + name;
  segment->fd = std::move(fd);
  segment->free.release(kBlock, size - kBlock);
  return segment;
}

std::uint64_t Segments::remove_empty(std::uint64_t wanted) {
  std::uint64_t freed = 0;
  for (auto at = segments_.begin(); at != segments_.end() && freed < wanted;) {
    const SegmentPtr segment = at->second;
    if (segment->free.free_units() + kBlock != segment->size) {
      ++at;
      continue;
    }
    unlinkat(drives_[segment->drive].fd.get(), name_of(segment->id).c_str(), 0);
    freed += segment->size;
    allocated_ -= segment->size;
    drives_[segment->drive].bytes -= segment->size;
    ++removed_;
    at = segments_.erase(at);
  }
  return freed;
}

std::uint64_t Segments::trim(bool refused) {
  const std::lock_guard lock(mutex_);
  recall_leased();
  std::uint64_t freed = remove_empty(~0ull);
  if (!refused) return freed;
  for (const auto& [drive, name] : refused_) {
    const Fd fd = open_file(drives_[drive].fd.get(), name, O_RDONLY, name);
    freed += file_size(fd.get(), name);
    unlinkat(drives_[drive].fd.get(), name.c_str(), 0);
  }
  refused_.clear();
  return freed;
}

Fd Segments::scratch_file(std::uint32_t drive, std::uint64_t size, bool direct) {
  const DriveDir& home = drives_[drive];
  const std::string name = name_of(0);
  unlinkat(home.fd.get(), name.c_str(), 0);
  const int flags = O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC | (direct ? O_DIRECT : 0);
  Fd fd(openat(home.fd.get(), name.c_str(), flags, 0600));
  const int code = errno;
  // Some file systems make the file and then refuse O_DIRECT.
  unlinkat(home.fd.get(), name.c_str(), 0);
  if (!fd && direct && code == EINVAL) return fd;
  if (!fd) throw io_error("creation of a file in " + home.path, code);
  if (ftruncate(fd.get(), static_cast<off_t>(size)) != 0)
    throw io_error("sizing a file in " + home.path, errno);
  return fd;
}

}  // namespace tiercache
