// Whole records to and from a drive, in pieces, with their checksums.
#pragma once
#include <chrono>
#include <cstdint>

#include "aligned.hpp"
#include "drive.hpp"
#include "segments.hpp"

namespace tiercache {

inline constexpr std::uint64_t kPiece = 1 << 20;  // payload bytes of one I/O

// What record I/O needs of its surroundings.
struct RecordPath {
  Drive& drive;
  const Segment& segment;
  const Uuid& uuid;
  bool direct;         // memory must be aligned: bounce what isn't
  BufferPool& bounce;  // of kPiece-sized buffers, apart for reads and writes
  std::chrono::steady_clock::time_point deadline;
};

// Writes header and payload; fills the rest of `header` (place, chunks, checksum) itself. Throws kIo with the
// errno, kTimeout; whatever happens, no I/O on `data` is in flight afterwards.
void write_record(const RecordPath& path, std::uint64_t offset, const std::uint8_t* data,
                  const RecordInfo& info);

// Fills `out` of expected.stored_bytes. Throws kCorrupt with the reason, kIo, kTimeout; no I/O on `out` is in
// flight afterwards.
void read_record(const RecordPath& path, std::uint64_t offset, std::uint8_t* out, const RecordInfo& expected);

// Makes what earlier writes of this segment left in caches durable.
void sync_segment(Drive& drive, const Segment& segment, std::chrono::steady_clock::time_point deadline);

}  // namespace tiercache
