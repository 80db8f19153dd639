/* outputnames.h: which names are outputs, as far as it takes to say of most names that they are not.
 *
 * A set of hashes of parent and name, counted, because two names may have the same: so it never denies a name that was
 * added, and once in 2^64 or so sends one to Python in vain. Python adds and removes; any thread asks. Owns its memory.
 */
#ifndef FANSTORE_OUTPUTNAMES_H
#define FANSTORE_OUTPUTNAMES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct fsx_output_names;

/* NULL without memory. */
struct fsx_output_names *fsx_output_names_new(void);
/* Nobody may use it any more. NULL is allowed. */
void fsx_output_names_free(struct fsx_output_names *names);

/* False without memory. */
bool fsx_output_names_add(struct fsx_output_names *names, uint64_t parent, const void *name, size_t name_bytes);

/* Whether it was there. */
bool fsx_output_names_remove(struct fsx_output_names *names, uint64_t parent, const void *name, size_t name_bytes);

bool fsx_output_names_has(struct fsx_output_names *names, uint64_t parent, const void *name, size_t name_bytes);

#endif
