// What is on disk: the header of a segment, the header of a record, and the index's value. All little-endian,
// fixed offsets, no padding that isn't zero.
#pragma once
#include <array>
#include <cstdint>
#include <string>

namespace tiercache {

inline constexpr std::uint64_t kBlock = 4096;  // unit of every offset and length, and the size of a header
inline constexpr std::uint32_t kFormat = 1;
inline constexpr std::uint32_t kPersistent = 1;  // flag: the record may be found by a later process
inline constexpr std::uint32_t kHasKey = 2;      // flag: node, graph, layer and kind are filled

using Digest = std::array<std::uint8_t, 32>;
using Uuid = std::array<std::uint8_t, 16>;

// What a record says of its payload. Text fields end with zeros.
struct RecordInfo {
  Digest digest{}, name_space{}, node{};
  std::uint64_t graph = 0;
  std::uint64_t raw_bytes = 0, stored_bytes = 0;
  std::uint64_t sequence = 0;    // of the write, over the life of the store
  std::uint64_t created_ns = 0;  // wall clock
  std::array<std::int64_t, 8> shape{};
  std::int32_t layer = 0;
  std::uint32_t flags = 0, ndim = 0, reserved = 0;
  std::array<char, 16> codec{}, dtype{};
  std::array<char, 32> kind{};
};
static_assert(sizeof(RecordInfo) == 96 + 5 * 8 + 64 + 16 + 64);

// Where a record lies.
struct RecordPlace {
  std::uint64_t epoch = 0, offset = 0;  // of its segment's life; of the header in the file
  std::uint32_t segment = 0, reserved = 0;
};
static_assert(sizeof(RecordPlace) == 24);

inline constexpr std::size_t kMaxChunks = 896;

// The first block of a record; the payload follows, padded with zeros to whole blocks.
struct RecordHeader {
  std::array<char, 8> magic{};
  std::uint32_t version = 0;
  std::uint32_t header_crc = 0;  // of this block with zero here, seeded with uuid, epoch, segment and offset
  RecordPlace place;
  RecordInfo info;
  std::uint32_t chunk_log2 = 0, num_chunks = 0;
  std::array<std::uint8_t, 512 - 16 - 24 - sizeof(RecordInfo) - 8> zero{};
  std::array<std::uint32_t, kMaxChunks> chunk_crc{};  // CRC32C of each payload chunk
};
static_assert(sizeof(RecordHeader) == kBlock);

// The first block of a segment file.
struct SegmentHeader {
  std::array<char, 8> magic{};
  std::uint32_t version = 0, header_crc = 0;
  Uuid uuid{};
  std::uint64_t epoch = 0, size = 0;
  std::uint32_t segment = 0, drive = 0;
  std::array<std::uint8_t, kBlock - 56> zero{};
};
static_assert(sizeof(SegmentHeader) == kBlock);

// The index's value of one record.
struct IndexValue {
  RecordInfo info;
  RecordPlace place;
  std::uint64_t hits = 0;
  std::uint32_t reserved = 0, crc = 0;
};
static_assert(sizeof(IndexValue) == sizeof(RecordInfo) + sizeof(RecordPlace) + 16);

// Length of a whole record in the file.
constexpr std::uint64_t record_length(std::uint64_t stored_bytes) {
  return kBlock + (stored_bytes + kBlock - 1) / kBlock * kBlock;
}

// Chunk of the payload checksums: 1 MiB, doubled until the header has room for all.
std::uint32_t chunk_log2_for(std::uint64_t stored_bytes);

// Fills magic, version and header_crc; everything else is the caller's.
void seal(RecordHeader& header, const Uuid& uuid);
void seal(SegmentHeader& header);
void seal(IndexValue& value);

// Empty text when the block is this record's header, else the reason. `room` is what is left of the file
// behind place.offset: nothing is believed that points outside it.
std::string refuse_record(const RecordHeader& header, const Uuid& uuid, const RecordPlace& place,
                          std::uint64_t room);
std::string refuse_segment(const SegmentHeader& header, const Uuid& uuid, std::uint32_t segment,
                           std::uint64_t file_bytes);
std::string refuse_value(const IndexValue& value);

// Empty text when the header belongs to what the caller expects, else which field differs.
std::string differs(const RecordInfo& found, const RecordInfo& expected);

std::string hex(const Digest& digest);

}  // namespace tiercache
