// CRC32C (Castagnoli), the checksum of record headers and payloads.
#pragma once
#include <cstddef>
#include <cstdint>

namespace tiercache {

// Continues `crc` (0 to start) over `size` bytes at `data`, by the fastest path that this processor has.
std::uint32_t crc32c(std::uint32_t crc, const void* data, std::size_t size) noexcept;

// The paths, of which every one gives the same result: "portable", "sse4.2" (three interleaved streams of the
// crc32 instruction) and "vpclmulqdq" (carry-less products of 256 bytes a step).
const char* crc32c_path() noexcept;

// One named path, for tests and measurements; false when this processor lacks it.
bool crc32c_by(const char* path, std::uint32_t& crc, const void* data, std::size_t size) noexcept;

}  // namespace tiercache
