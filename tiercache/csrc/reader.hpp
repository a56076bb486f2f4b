// Reading records of a store that another process may be writing to.
#pragma once
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "aligned.hpp"
#include "segments.hpp"

namespace tiercache {

// Opens segments when they are first asked for and never writes. A lease is a shared lock of the kernel on
// the record's range of its file: the writer reuses no range that is locked, and the kernel drops the lock
// when this process ends, however it ends. Safe from several threads.
class Reader {
 public:
  Reader(std::vector<std::string> directories, const Uuid& uuid);

  // Takes a lease on the record that `value` points to. The caller must look the key up again afterwards:
  // what the index still says then cannot be reused before release(). Throws kMissing when there is no such
  // segment.
  void lease(const IndexValue& value);
  void release(const IndexValue& value);

  // Fills `out` of value.info.stored_bytes. Throws kCorrupt with the reason, kMissing, kIo.
  void read(const IndexValue& value, std::uint8_t* out);

  std::uint64_t leases() const;

 private:
  SegmentPtr segment(const RecordPlace& place);
  void check_process() const;

  std::vector<std::string> directories_;
  Uuid uuid_;
  int owner_;
  mutable std::mutex mutex_;
  std::map<std::uint32_t, SegmentPtr> segments_;
  std::map<std::pair<std::uint32_t, std::uint64_t>, unsigned> leases_;  // segment and offset
};

}  // namespace tiercache
