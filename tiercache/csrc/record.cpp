#include "record.hpp"

#include <cstring>

#include "checksum.hpp"

namespace tiercache {
namespace {

constexpr std::array<char, 8> kRecordMagic{'T', 'C', 'R', 'E', 'C', 'O', 'R', 'D'};
constexpr std::array<char, 8> kSegmentMagic{'T', 'C', 'S', 'E', 'G', 'M', 'N', 'T'};

std::uint32_t crc_of(const RecordHeader& header, const Uuid& uuid, const RecordPlace& place) {
  RecordHeader copy = header;
  copy.header_crc = 0;
  std::uint32_t crc = crc32c(0, uuid.data(), uuid.size());
  crc = crc32c(crc, &place, sizeof place);
  return crc32c(crc, &copy, sizeof copy);
}

std::uint32_t crc_of(const SegmentHeader& header) {
  SegmentHeader copy = header;
  copy.header_crc = 0;
  return crc32c(0, &copy, sizeof copy);
}

std::uint32_t crc_of(const IndexValue& value) {
  IndexValue copy = value;
  copy.crc = 0;
  return crc32c(0, &copy, sizeof copy);
}

template <std::size_t N>
bool ends(const std::array<char, N>& text) {
  return text.back() == '\0';
}

std::string refuse_info(const RecordInfo& info) {
  if (info.ndim > info.shape.size()) return "more dimensions than a record has";
  if (!ends(info.codec) || !ends(info.dtype) || !ends(info.kind)) return "text without end";
  if (info.stored_bytes == 0 || info.stored_bytes > (1ull << 62)) return "impossible length";
  return {};
}

}  // namespace

std::uint32_t chunk_log2_for(std::uint64_t stored_bytes) {
  std::uint32_t log2 = 20;
  while (((stored_bytes - 1) >> log2) >= kMaxChunks) ++log2;
  return log2;
}

void seal(RecordHeader& header, const Uuid& uuid) {
  header.magic = kRecordMagic;
  header.version = kFormat;
  header.header_crc = crc_of(header, uuid, header.place);
}

void seal(SegmentHeader& header) {
  header.magic = kSegmentMagic;
  header.version = kFormat;
  header.header_crc = crc_of(header);
}

void seal(IndexValue& value) { value.crc = crc_of(value); }

std::string refuse_record(const RecordHeader& header, const Uuid& uuid, const RecordPlace& place,
                          std::uint64_t room) {
  if (header.magic != kRecordMagic) return "no record";
  if (header.version != kFormat) return "record of another version";
  if (header.header_crc != crc_of(header, uuid, place)) return "header checksum";
  if (std::memcmp(&header.place, &place, sizeof place) != 0) return "record of another place";
  const RecordInfo& info = header.info;
  if (auto reason = refuse_info(info); !reason.empty()) return reason;
  if (record_length(info.stored_bytes) > room) return "record longer than its file";
  if (header.chunk_log2 != chunk_log2_for(info.stored_bytes) ||
      header.num_chunks != ((info.stored_bytes - 1) >> header.chunk_log2) + 1) {
    return "chunk count";
  }
  return {};
}

std::string refuse_segment(const SegmentHeader& header, const Uuid& uuid, std::uint32_t segment,
                           std::uint64_t file_bytes) {
  if (header.magic != kSegmentMagic) return "no segment";
  if (header.version != kFormat) return "segment of another version";
  if (header.header_crc != crc_of(header)) return "segment header checksum";
  if (header.uuid != uuid) return "segment of another store";
  if (header.segment != segment) return "segment under another name";
  if (header.size != file_bytes || header.size % kBlock != 0 || header.size < 2 * kBlock)
    return "segment truncated";
  return {};
}

std::string refuse_value(const IndexValue& value) {
  if (value.crc != crc_of(value)) return "index entry checksum";
  return refuse_info(value.info);
}

std::string differs(const RecordInfo& found, const RecordInfo& expected) {
  if (found.digest != expected.digest) return "another key";
  if (found.name_space != expected.name_space) return "another namespace";
  if (found.stored_bytes != expected.stored_bytes) return "another length";
  if (found.raw_bytes != expected.raw_bytes || found.ndim != expected.ndim || found.shape != expected.shape ||
      found.dtype != expected.dtype || found.codec != expected.codec) {
    return "another shape, dtype or codec";
  }
  if (expected.sequence != 0 && found.sequence != expected.sequence) return "another write of the same key";
  return {};
}

std::string hex(const Digest& digest) {
  constexpr char digits[] = "0123456789abcdef";
  std::string text;
  for (const std::uint8_t byte : digest) {
    text += digits[byte >> 4];
    text += digits[byte & 15];
  }
  return text;
}

}  // namespace tiercache
