// The device codecs' steps over every thread index, on the host and in order: what a card computes, for
// tests.
#pragma once
#include <cstddef>
#include <cstdint>

#include "codec_quant_host.hpp"

namespace tiercache::codec {

// Bodies as the device writes them; the length may exceed `room`, and then the body is not complete.
std::uint64_t emulate_window_encode(const std::uint16_t* x, std::size_t n, std::uint8_t* out,
                                    std::size_t room);
std::uint64_t emulate_quant_encode(const void* x, QuantShape shape, QuantFormat format, QuantElement element,
                                   std::uint64_t seed, std::uint8_t* out, std::size_t room);

// False where the device would set its `bad` flag.
bool emulate_window_decode(const std::uint8_t* body, std::uint64_t length, std::uint16_t* x, std::size_t n);
bool emulate_quant_decode(const std::uint8_t* body, std::uint64_t length, void* x, QuantShape shape,
                          QuantFormat format, QuantElement element);

}  // namespace tiercache::codec
