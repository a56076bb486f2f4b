#include "checksum.hpp"

#include <cstring>
#include <iterator>

#include "checksum_paths.hpp"

namespace tiercache {
namespace {

constexpr CrcPath kPaths[] = {
#if defined(__x86_64__)
    {"vpclmulqdq", crc32c_vpclmul, has_vpclmul},
    {"sse4.2", crc32c_sse42, has_sse42},
#endif
    {"portable", crc32c_portable, []() noexcept { return true; }},
};

const CrcPath& best() noexcept {
  static const CrcPath& found = [&]() -> const CrcPath& {
    for (const CrcPath& path : kPaths) {
      if (path.available()) return path;
    }
    return kPaths[std::size(kPaths) - 1];
  }();
  return found;
}

}  // namespace

std::uint32_t crc32c(std::uint32_t crc, const void* data, std::size_t size) noexcept {
  return ~best().update(~crc, static_cast<const std::uint8_t*>(data), size);
}

const char* crc32c_path() noexcept { return best().name; }

bool crc32c_by(const char* name, std::uint32_t& crc, const void* data, std::size_t size) noexcept {
  for (const CrcPath& path : kPaths) {
    if (std::strcmp(path.name, name) != 0 || !path.available()) continue;
    crc = ~path.update(~crc, static_cast<const std::uint8_t*>(data), size);
    return true;
  }
  return false;
}

}  // namespace tiercache
