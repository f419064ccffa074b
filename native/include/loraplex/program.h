/* Programs: calls of this library's ops, written down once and made again without their caller. */
#ifndef LORAPLEX_PROGRAM_H
#define LORAPLEX_PROGRAM_H

#include "loraplex/abi.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The number that stands for an op in a program; -1 if it cannot be in one. */
LORAPLEX_API int64_t loraplex_program_op(const char *name);

/* code is one call after another, of 3 + num_arguments words each:
 *
 *   op, num_arguments, parameter mask, arguments
 *
 * An argument is a pointer, an integer, or the bits of a float. Where bit i of the mask is set, it
 * is parameters[argument i]. Ends with the first op that fails, and its status. */
LORAPLEX_API loraplex_status loraplex_run_program(const int64_t *code, int64_t num_words,
                                                  const int64_t *parameters,
                                                  int64_t num_parameters);

#ifdef __cplusplus
}
#endif

#endif
