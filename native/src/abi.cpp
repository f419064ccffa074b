#include "loraplex/abi.h"

int32_t loraplex_abi_version(void) { return LORAPLEX_ABI_VERSION; }

const char *loraplex_instruction_set(void) { return LORAPLEX_INSTRUCTION_SET; }
