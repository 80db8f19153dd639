/* swaps.h: shuffles of frameworks, replayed from the random numbers that they draw.
 *
 * Each of these is a loop in which one step needs the result of the one before, which numpy cannot do: 1.3 million steps
 * take a second in Python and some 10 ms here. The numbers are drawn by numpy (fanstore/order/twister.py, philox.py).
 * Pure functions on memory of the caller. The same in plain Python, for comparison: tests/order_reference.py.
 */
#ifndef FANSTORE_ORDER_SWAPS_H
#define FANSTORE_ORDER_SWAPS_H

#include <stddef.h>
#include <stdint.h>

/* The shuffle of torch.randperm, in place: for each place from the front, swap with draw mod (places from here on). With
 * fewer draws than `count` - 1, only so many leading places are final. */
void fsx_swap_forward(const uint32_t *draws, size_t draws_count, int64_t *order, size_t count);

/* The shuffle of Python's random.shuffle, in place: for each place from the back, swap with one at or before it, which the
 * leading bits of a draw say; a draw that says too much is drawn again. Returns the draws used, or SIZE_MAX if they did
 * not suffice. `count` is at most UINT32_MAX. */
size_t fsx_swap_backward(const uint32_t *draws, size_t draws_count, int64_t *order, size_t count);

/* The shuffle of tf.data.Dataset.shuffle, of 0, 1, 2, ... to `order`: a buffer that holds the next `buffer` items of the input, from which one is
 * taken at random and replaced. One draw per item. `ring` is scratch memory for `buffer` items; `buffer` is not 0. */
void fsx_swap_buffer(const uint32_t *draws, int64_t *order, size_t count, int64_t *ring, size_t buffer);

#endif
