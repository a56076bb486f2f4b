#include <cstring>

#include "codec_exponent_kernels.hpp"

#define TC_PATH exponent_portable
#define TC_TARGET
#include "codec_exponent_scalar.hpp"

namespace tiercache::codec {

const ExponentKernels kExponentPortable = {exponent_portable::split, exponent_portable::row_sums,
                                           exponent_portable::channel_sums, exponent_portable::encode,
                                           exponent_portable::decode};

}  // namespace tiercache::codec
