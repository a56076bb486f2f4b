// The lossy codecs over a whole page on the host.
#pragma once
#include <cstddef>
#include <cstdint>

#include "codec_base.hpp"
#include "codec_quant.hpp"

namespace tiercache::codec {

enum class QuantFormat : int { e4m3 = 0, int8 = 1, int4 = 2 };
enum class QuantElement : int { bf16 = 0, half = 1, single = 2 };

struct QuantResult {
  std::size_t bytes;       // 0 when the body would exceed the room
  std::size_t exceptions;  // groups kept as they are
};

// Encodes a page of the shape's elements into at most `room` bytes.
QuantResult quant_encode(const void* x, QuantShape shape, QuantFormat format, QuantElement element,
                         std::uint64_t seed, std::uint8_t* out, std::size_t room, Isa isa, int threads);

// Fills the page from a body. Throws Malformed; never reads outside the body or writes outside the page.
void quant_decode(const std::uint8_t* body, std::size_t size, void* x, QuantShape shape, QuantFormat format,
                  QuantElement element, Isa isa, int threads);

}  // namespace tiercache::codec
