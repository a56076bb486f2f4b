// The disk tier's core: slots, records, and the journal that the index is written from.
#pragma once
#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "drive.hpp"
#include "faults.hpp"
#include "record_io.hpp"
#include "segments.hpp"

namespace tiercache {

enum class Durability : std::uint8_t { kScratch, kProcess, kPower };

struct DiskOptions {
  SegmentOptions segments;
  Durability durability = Durability::kScratch;
  std::string engine = "auto";  // "auto", "io_uring", "threads"
  unsigned depth = 16, threads = 4, bounce_buffers = 8;
  double timeout_s = 60;
  std::uint64_t next_sequence = 1;
  std::shared_ptr<Faults> faults;  // null: no fault engine
  std::shared_ptr<WriteLog> log;   // null: no log
};

struct DiskStats {
  std::uint64_t used_bytes = 0, spare_bytes = 0, slots = 0, records = 0, pending_bytes = 0, journal = 0;
  std::uint64_t hits = 0, adopted = 0, refused = 0, evicted_unclaimed = 0, served_from_memory = 0,
                moved_writes = 0;
  std::vector<std::pair<std::string, std::uint64_t>> misses;  // reason, count
  SegmentsStats segments;
  std::vector<DriveStats> drives;
  std::vector<std::string> rungs;  // of each drive: "io_uring+direct"; with why not, where it is lower
};

// One change of the index. An empty value deletes, but only while the index still holds this sequence number.
struct IndexChange {
  Digest digest{};
  std::uint64_t sequence = 0;
  std::optional<IndexValue> value;
};

struct ScanReport {
  std::uint64_t found = 0, adopted = 0, bytes = 0;
  std::vector<std::string> bad;
};

class Disk {
 public:
  explicit Disk(DiskOptions options);
  ~Disk();
  Disk(const Disk&) = delete;
  Disk& operator=(const Disk&) = delete;

  // ---- slots ----
  // Never waits: throws kFull while room is only on its way back, see make_room().
  std::uint64_t reserve(std::uint64_t num_bytes);
  // Lets records that nobody claims give way, and waits until deletions are committed, so that a reserve() of
  // as much would find room. False when there is none to be had by the deadline.
  bool make_room(std::uint64_t num_bytes, double wait_s);
  void write(std::uint64_t slot, const std::uint8_t* data, std::uint64_t size, RecordInfo info);
  void read(std::uint64_t slot, std::uint8_t* out, std::uint64_t size, const RecordInfo& expected);
  // Ends a slot; a persistent record is deleted with it.
  void free(std::uint64_t slot);
  // Ends one claim on a slot: its own, or that of a look-up. After the last, a persistent record stays to be
  // looked up again and gives way when room is needed; any other is deleted.
  void let_go(std::uint64_t slot);

  // ---- persistent records ----
  // Each record that is found is claimed: it stays until it is freed or let go.
  using Found = std::optional<std::pair<std::uint64_t, RecordInfo>>;
  std::vector<Found> lookup(const std::vector<Digest>& digests);
  bool remove(const Digest& digest);
  std::vector<std::pair<std::uint64_t, IndexValue>> records() const;

  // ---- index: one thread takes changes, writes them and confirms ----
  std::vector<std::string> open_existing(bool keep) { return segments_.open_existing(keep); }
  // Empty text, or why the entry is refused.
  std::string adopt(const IndexValue& value);
  // Waits up to `wait_s` for changes and then up to `gather_s` for more, at most `most`. With kPower the
  // records behind them are synced first; those that can't be are left out.
  std::vector<IndexChange> take_changes(std::size_t most, double wait_s, double gather_s);
  // `written` false: deletions are taken again with the next batch, new records stay out of the index.
  void confirm_changes(bool written);
  // Changes for every record whose count of hits has moved since the index learned it.
  void journal_hits();
  // Waits until every change made before the call is confirmed. False at the deadline.
  bool flush(double timeout_s);
  // Reads one segment from end to end and adopts the newest valid persistent record of each key.
  ScanReport scan(const std::vector<std::uint32_t>& segments);
  std::vector<std::uint32_t> segment_ids() const;

  std::uint64_t used_bytes() const;
  // Of them, records that nobody claims: they give way when room is needed.
  std::uint64_t spare_bytes() const;
  std::uint64_t capacity_bytes() const { return segments_.options().capacity_bytes; }
  std::uint64_t next_sequence() const { return sequence_.load(); }
  std::uint64_t trim(bool refused) { return segments_.trim(refused); }
  DiskStats stats() const;
  void check_integrity() const;
  // False when I/O was still in flight at the deadline; its memory is then left to it.
  bool close(double timeout_s);

 private:
  enum class State : std::uint8_t { kReserved, kWriting, kWritten };
  struct Entry {
    Extent extent;
    std::uint64_t num_bytes = 0;
    State state = State::kReserved;
    RecordInfo info;
    const std::uint8_t* source = nullptr;  // while writing
    unsigned users = 0;                    // reads in progress
    bool doomed = false;                   // freed while read: the last reader ends it
    bool indexed = false;                  // the index has, or is about to have, this record
    unsigned claims = 1;                   // 0: of an earlier process or let go, and not asked for since
    std::uint64_t order = 0;               // among the unclaimed: lower ones give way first
    bool bad = false;                      // failed its proof
    std::uint64_t hits = 0, indexed_hits = 0;
  };
  struct Change {
    IndexChange change;
    Extent freed;  // room that comes back once the change is confirmed
  };
  struct DigestHash {
    std::size_t operator()(const Digest& digest) const noexcept;
  };
  class Use;  // counts an operation in progress

  void check_process() const;
  void check_open() const;  // under the mutex
  void open_drive(std::uint32_t drive);
  void sync_changes(std::vector<Change>& changes);
  void forget_change(const Change& change);  // under the mutex
  void scan_segment(const SegmentPtr& segment, std::vector<IndexValue>& found, ScanReport& report);
  std::optional<Extent> place(std::uint64_t length, double wait_s);
  bool evict_unclaimed(std::uint64_t length);
  void end_entry(std::uint64_t slot);                    // under the mutex
  void publish_record(std::uint64_t slot);               // under the mutex
  void shelve(std::uint64_t slot, std::uint64_t order);  // under the mutex: nobody claims it any more
  void unshelve(std::uint64_t slot);                     // under the mutex
  void journal(IndexChange change, Extent freed);        // under the mutex
  void distrust(std::uint64_t slot, const std::string& reason);
  void miss(const std::string& reason);
  RecordPath path_of(const Extent& extent, bool reading);
  IndexValue value_of(const Entry& entry) const;
  double load(std::uint32_t drive) const;

  DiskOptions options_;
  int owner_;
  Segments segments_;
  std::vector<std::unique_ptr<Drive>> drives_;
  std::vector<std::string> rungs_;
  BufferPool read_bounce_, write_bounce_;
  std::atomic<std::uint64_t> sequence_;

  mutable std::mutex mutex_;
  std::condition_variable changed_;  // the journal, and what was confirmed of it
  std::condition_variable calmed_;   // the last user of an entry, or of a closed store, has left
  std::unordered_map<std::uint64_t, Entry> slots_;
  std::unordered_map<Digest, std::uint64_t, DigestHash> by_digest_;  // persistent, readable records
  std::set<std::pair<std::uint64_t, std::uint64_t>> unclaimed_;      // (order, slot)
  std::uint64_t next_slot_ = 1, used_ = 0, spare_ = 0, operations_ = 0;
  bool closed_ = false;

  std::deque<Change> journal_;
  std::vector<Change> taken_;
  std::uint64_t journaled_ = 0, confirmed_ = 0, pending_bytes_ = 0;
  bool hurry_ = false;
  DiskStats counts_;
  std::unordered_map<std::string, std::uint64_t> misses_;
};

}  // namespace tiercache
