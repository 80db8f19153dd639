/* ask.h: requests of the library to the daemon, over the control socket (docs/protocol.md, "The control socket").
 *
 * The socket lies beside the directory of the state. A connection is made when the first request needs one, and kept; there are
 * a few, so that several threads can ask at once, and each has one request under way. While a thread asks, its signals wait.
 * Nothing is allocated, and nothing of it gives SIGPIPE. A child of fork connects anew, the child of a vfork for each request.
 *
 * A daemon that does not answer in time, another user's, one of another version: all of it is EIO.
 */
#ifndef FANSTORE_PRELOAD_ASK_H
#define FANSTORE_PRELOAD_ASK_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Two paths and some numbers. */
#define FSX_REQUEST_BYTES 8704u
/* The library asks for nothing that is answered with more. */
#define FSX_ANSWER_BYTES 4352u
#define FSX_ANSWER_DESCRIPTORS 8u

/* A request while it is put together: a msgpack map. What does not fit is EIO when it is asked. */
struct fsx_request {
    const char *name;
    size_t bytes;
    unsigned limits; /* it may take so many times as long as others */
    bool spoiled;
    uint8_t body[FSX_REQUEST_BYTES];
};
/* `arguments`: how many of them follow, each with its name. */
void fsx_request_start(struct fsx_request *request, const char *name, unsigned arguments);
void fsx_request_text(struct fsx_request *request, const char *key, const char *value);
void fsx_request_bytes(struct fsx_request *request, const char *key, const void *value, size_t bytes);
void fsx_request_number(struct fsx_request *request, const char *key, uint64_t value);
void fsx_request_flag(struct fsx_request *request, const char *key, bool value);

/* The values of an answer, and the descriptors that came with it, all with FD_CLOEXEC: the caller's, to close with
 * fsx_answer_close or to take out (-1). */
struct fsx_answer {
    size_t bytes;
    unsigned descriptors;
    int descriptor[FSX_ANSWER_DESCRIPTORS];
    uint8_t body[FSX_ANSWER_BYTES];
};
bool fsx_answer_number(const struct fsx_answer *answer, const char *key, uint64_t *value);
/* Text or bytes, inside the answer, without a NUL. */
bool fsx_answer_text(const struct fsx_answer *answer, const char *key, const char **text, size_t *bytes);
void fsx_answer_close(struct fsx_answer *answer);

/* How long the daemon may take for an answer. */
extern int64_t fsx_limit_ns;
/* Before anything else of this part, with the directory of the state; false without memory. */
bool fsx_ask_start(const char *state);
/* Ask, and wait for the answer. 0, or an errno: the `errno` that the daemon's error has, otherwise EIO. */
int fsx_ask(const struct fsx_request *request, struct fsx_answer *answer);
/* The content of a regular file as a sealed memory file, opened for reading at offset 0; -1 with errno. */
int fsx_ask_content(uint32_t entry);

#endif
