/* outputcards.h: what stat says of directories that are outputs or hold some, as Python has last said it, and which of
 * them are lent to this node, to create files in (outputbirths.h).
 *
 * After each new name the kernel asks for the attributes of the directory again, so that a program that writes many small
 * files asks once per file; Python would need longer for that than for the file. A directory of which another node knows
 * more has no card. Any thread.
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

/* Keep what is to be answered for an inode (`out->attr.ino`, not 0), in place of what was kept before; it stays lent if it
 * was. False without memory: then nothing is kept. */
bool fsx_output_cards_put(struct fsx_output_cards *cards, const struct fuse_attr_out *out);
/* A name has come to the directory: its times are these from now on, if there is a card of it. Whether there is. */
bool fsx_output_cards_touch(struct fsx_output_cards *cards, uint64_t inode, uint64_t seconds, uint32_t nanoseconds);
/* The inode has none any more, and is not lent. How often it was told since that was last taken. */
uint64_t fsx_output_cards_drop(struct fsx_output_cards *cards, uint64_t inode);
/* It is lent to this node, or not any more; nothing if it has no card. */
void fsx_output_cards_lend(struct fsx_output_cards *cards, uint64_t inode, bool lent);
bool fsx_output_cards_is_lent(struct fsx_output_cards *cards, uint64_t inode);
/* What is kept for an inode; false if nothing is. */
bool fsx_output_cards_get(struct fsx_output_cards *cards, uint64_t inode, struct fuse_attr_out *out);
/* The same, to be told in an answer to LOOKUP, which the kernel counts, and Python must know. */
bool fsx_output_cards_tell(struct fsx_output_cards *cards, uint64_t inode, struct fuse_attr_out *out);
/* How often that was since it was last asked. */
uint64_t fsx_output_cards_take_told(struct fsx_output_cards *cards, uint64_t inode);

#endif
