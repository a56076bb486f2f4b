// The files of a store: which there are, what room they have, where the next record goes.
#pragma once
#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "extents.hpp"
#include "files.hpp"
#include "record.hpp"

namespace tiercache {

struct Segment {
  std::uint32_t id = 0;
  std::uint32_t drive = 0;
  std::uint64_t epoch = 0, size = 0;
  std::string path;
  Fd fd;
  ExtentMap free;                  // guarded by Segments
  std::uint64_t withheld = 0;      // bytes of records that failed their proof: not used again in this process
  bool quarantined = false;        // takes no more records
  std::atomic<bool> dirty{false};  // written to since the last sync
  std::atomic<bool> sync_failed{false};  // never synced again
};
using SegmentPtr = std::shared_ptr<Segment>;

struct Extent {
  SegmentPtr segment;
  std::uint64_t offset = 0, length = 0;
};

struct SegmentOptions {
  std::vector<std::string> directories;  // one a drive
  std::uint64_t capacity_bytes = 0;
  std::uint64_t segment_bytes = 0;  // 0: clamp(capacity / 64, 16 MiB, 512 MiB)
  Uuid uuid{};
  std::uint64_t epoch = 0;
  bool direct = true;          // offer O_DIRECT; each drive proves whether it works
  bool sync_metadata = false;  // new files are synced before their first record
  bool shared = false;         // other processes may hold leases on records
  unsigned max_errors = 8;     // I/O errors after which a drive is off
};

struct SegmentsStats {
  std::uint64_t segments = 0, file_bytes = 0, free_bytes = 0, withheld_bytes = 0, leased_bytes = 0;
  std::uint64_t growth_refused = 0, quarantined = 0, drives_off = 0, removed = 0;
};

class Segments {
 public:
  // How long a drive would take to get to new bytes; the least loaded one with room is used.
  using Load = std::function<double(std::uint32_t drive)>;

  explicit Segments(SegmentOptions options);

  // Takes over what earlier processes left. Returns a line for every file that is refused; throws on files
  // that nobody but an attacker or a mistake puts here. `keep` false: all segments of this store are removed.
  std::vector<std::string> open_existing(bool keep);

  // Room for one record: from free extents, else by growing. Nothing when there is none.
  std::optional<Extent> allocate(std::uint64_t length, const Load& load);
  void release(const Extent& extent);
  void withhold(const Extent& extent);
  // Marks a range of an existing segment as used; false when it is not free there.
  std::optional<Extent> claim(const RecordPlace& place, std::uint64_t length);

  // Counts an error of the drive; the segment takes no more records.
  void quarantine(const SegmentPtr& segment);
  // Removes files without records, and (`refused`) files that open_existing() refused. Returns bytes freed.
  std::uint64_t trim(bool refused);

  std::vector<SegmentPtr> list() const;
  SegmentsStats stats() const;
  bool direct(std::uint32_t drive) const { return drives_[drive].direct; }
  void set_buffered(std::uint32_t drive) { drives_[drive].direct = false; }
  std::uint32_t num_drives() const { return static_cast<std::uint32_t>(drives_.size()); }
  const SegmentOptions& options() const { return options_; }
  // A file of `size` bytes without a name on this drive, for probing.
  Fd scratch_file(std::uint32_t drive, std::uint64_t size, bool direct);
  std::uint64_t largest_record() const;
  bool consistent(std::uint64_t used_bytes) const;

 private:
  struct DriveDir {
    std::string path;
    Fd fd;
    bool direct = true, off = false;
    unsigned errors = 0;
    std::uint64_t bytes = 0;  // of its files
    std::chrono::steady_clock::time_point full_until{};
  };
  void open_one(std::uint32_t drive, const std::string& name, bool keep, std::vector<std::string>& refused);
  std::optional<Extent> take(std::uint32_t drive, std::uint64_t length);  // under the mutex
  bool grow(std::uint32_t drive, std::uint64_t length);                   // takes the mutex itself
  std::uint64_t growth(std::uint64_t length, std::uint64_t limit) const;
  SegmentPtr create(std::uint32_t drive, std::uint32_t id, std::uint64_t size, int& code);
  std::uint64_t remove_empty(std::uint64_t wanted);  // under the mutex
  void recall_leased();                              // under the mutex

  SegmentOptions options_;
  std::vector<DriveDir> drives_;
  mutable std::mutex mutex_;
  std::mutex grow_mutex_;
  std::map<std::uint32_t, SegmentPtr> segments_;
  std::vector<Extent> leased_;  // freed, but a reader process still holds a lease
  std::vector<std::pair<std::uint32_t, std::string>> refused_;  // drive and name
  std::uint64_t allocated_ = 0;  // bytes of all files, those in creation included
  std::uint32_t next_id_ = 1;
  std::uint64_t growth_refused_ = 0, removed_ = 0;
};

}  // namespace tiercache
