#include <cstring>

#include "codec_quant_kernels.hpp"

#define TC_PATH quant_portable
#define TC_TARGET
#include "codec_quant_scalar.hpp"

namespace tiercache::codec {

const QuantTable kQuantPortable = TC_QUANT_TABLE;

}  // namespace tiercache::codec
