/* outputcards.h: what stat says of directories that are outputs or hold some, as Python has last said it.
 *
 * After each new name the kernel asks for the attributes of the directory again, so that a program that writes many small
 * files asks once per file; Python would need longer for that than for the file. Any thread.
 */
#ifndef FANSTORE_OUTPUTCARDS_H
#define FANSTORE_OUTPUTCARDS_H

#include <linux/fuse.h>
#include <stdbool.h>
#include <stdint.h>

struct fsx_output_cards;

/* NULL without memory. */
struct fsx_output_cards *fsx_output_cards_new(void);
void fsx_output_cards_free(struct fsx_output_cards *cards);

/* Keep what is to be answered for an inode (`out->attr.ino`, not 0), in place of what was kept before. False without
 * memory: then nothing is kept. */
bool fsx_output_cards_put(struct fsx_output_cards *cards, const struct fuse_attr_out *out);
/* A name has come to the directory: its times are these from now on, if there is a card of it. Whether there is. */
bool fsx_output_cards_touch(struct fsx_output_cards *cards, uint64_t inode, uint64_t seconds, uint32_t nanoseconds);
/* The inode has none any more. */
void fsx_output_cards_drop(struct fsx_output_cards *cards, uint64_t inode);
/* What is kept for an inode; false if nothing is. */
bool fsx_output_cards_get(struct fsx_output_cards *cards, uint64_t inode, struct fuse_attr_out *out);

#endif
