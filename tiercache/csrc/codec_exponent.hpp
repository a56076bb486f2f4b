// The exponent codec: a bf16's sign and mantissa as a byte, its exponent as the code of its distance from a
// prediction. One page is cut into blocks that stay in the second-level cache.
//
// body   := u32 block_bytes[num_blocks], segments[]?, blocks, the elements that fill no row (2 bytes each)
// segment := u8 mean, u8 channel_mean[cols]: of about 1024 rows, with a prediction by channels
// block  := u8 0, u16 elements                                                  stored
//         | u8 1, u8 grand_mean, u32 num_escapes, u32 sizes[levels][2],
//           u8 row_mean[rows]?, u8 sign_mantissa[n], planes, u8 escapes[]       coded
// planes := for each level: u64 a[], u64 b[]?, u8 c[]?: bits of the elements that it holds, 64 a word, and of
//           those that have a third bit, in order; sizes[level] says how many elements and how many third
//           bits
// A block has `rows` whole rows of `cols` elements, in vectors of 64.
#pragma once
#include <cstddef>
#include <cstdint>

#include "codec_base.hpp"
#include "codec_levels.hpp"

namespace tiercache::codec {

constexpr std::size_t kBlock = 65536;  // elements
constexpr std::size_t kVector = 64;    // elements

// Upper bound of what encode writes for n elements. `cols` is a multiple of 64, at most kBlock.
std::size_t exponent_bound(std::size_t n, std::size_t cols);

// Encodes n bf16 words; returns the body's size. `out` has exponent_bound(n, cols) bytes. Adds to `counts`,
// when it is given, a sample of the exponents against the prediction that was used.
std::size_t exponent_encode(const std::uint16_t* x, std::size_t n, std::size_t cols,
                            const ExponentTable& table, std::uint8_t* out, Isa isa, int threads,
                            Counts* counts);

// Decodes a body into n words. Throws Malformed; never reads outside the body or writes outside x.
void exponent_decode(const std::uint8_t* body, std::size_t size, std::uint16_t* x, std::size_t n,
                     std::size_t cols, const ExponentTable& table, Isa isa, int threads);

// Counts of exponents against a prediction over at most `max_blocks` blocks spread over the page.
Counts exponent_counts(const std::uint16_t* x, std::size_t n, std::size_t cols, Prediction prediction,
                       std::size_t max_blocks, Isa isa);

// Bits an exponent takes with a table on such a sample, side information of the prediction counted.
double exponent_cost(const std::uint16_t* x, std::size_t n, std::size_t cols, const ExponentTable& table,
                     std::size_t max_blocks, Isa isa);

// The table that makes a page like this one smallest, side information of the prediction counted.
ExponentTable exponent_train(const std::uint16_t* x, std::size_t n, std::size_t cols, std::size_t max_blocks,
                             Isa isa);

}  // namespace tiercache::codec
