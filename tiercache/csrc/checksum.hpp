// CRC32C (Castagnoli), the checksum of record headers and payloads.
#pragma once
#include <cstddef>
#include <cstdint>

namespace tiercache {

// Continues `crc` (0 to start) over `size` bytes at `data`.
std::uint32_t crc32c(std::uint32_t crc, const void* data, std::size_t size) noexcept;

}  // namespace tiercache
