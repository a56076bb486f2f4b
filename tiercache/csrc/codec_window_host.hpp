// The window codec over a whole page on the host.
#pragma once
#include <cstddef>
#include <cstdint>

#include "codec_base.hpp"

namespace tiercache::codec {

// Upper bound of what encode writes for n elements, were every element escaped.
std::size_t window_bound(std::size_t n);

// Encodes n bf16 words; returns the body's size, or 0 when it would exceed `room` bytes.
std::size_t window_encode(const std::uint16_t* x, std::size_t n, std::uint8_t* out, std::size_t room, Isa isa,
                          int threads);

// Decodes a body into n words. Throws Malformed; never reads outside the body or writes outside x.
void window_decode(const std::uint8_t* body, std::size_t size, std::uint16_t* x, std::size_t n, Isa isa,
                   int threads);

}  // namespace tiercache::codec
