// What a path of the lossy codecs implements, over the groups begin..end-1 of a page.
#pragma once
#include <cstddef>
#include <cstdint>

#include "codec_quant_host.hpp"

namespace tiercache::codec {

struct QuantKernels {
  // Writes scales and codes; returns how many groups are exceptions.
  std::size_t (*encode)(const void* x, QuantShape shape, std::uint64_t seed, std::size_t begin,
                        std::size_t end, std::uint8_t* body);
  // False when an exception is missing.
  bool (*decode)(const std::uint8_t* body, QuantShape shape, std::size_t num_exceptions, std::size_t begin,
                 std::size_t end, void* x);
};

// By format, then element.
using QuantTable = QuantKernels[3][3];
extern const QuantTable kQuantPortable;
#if defined(__x86_64__)
extern const QuantTable kQuantAvx2;
extern const QuantTable kQuantAvx512;
#endif

}  // namespace tiercache::codec
