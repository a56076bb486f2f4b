// Constant byte planes: fp32 that was made from bf16 has two planes of zeros, an unused buffer has four.
#pragma once
#include <cstddef>
#include <cstdint>

namespace tiercache::codec {

// Bit b is set when byte b is the same in all `count` elements of `width` bytes (1, 2, 4 or 8).
std::uint8_t constant_planes(const std::uint8_t* data, std::size_t count, std::size_t width);

// mask, the constants, then each element's other bytes; returns the size, at most 1 + count * width.
std::size_t planes_encode(const std::uint8_t* data, std::size_t count, std::size_t width, std::uint8_t* out);

// Throws Malformed unless the body is exactly one of `count` elements of `width` bytes.
void planes_decode(const std::uint8_t* body, std::size_t size, std::uint8_t* data, std::size_t count,
                   std::size_t width);

}  // namespace tiercache::codec
