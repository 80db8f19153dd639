/* ask.c: see ask.h. */
#include "preload/ask.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include "base/nanoseconds.h"
#include "preload/preload.h"
#include "preload/sockets.h"

#define PROTOCOL 1
#define HEADER_BYTES 8u
/* Seconds for an answer: longer than a daemon needs to find out that all sources of a file are silent. */
#define LIMIT_VARIABLE "FANSTORE_PRELOAD_TIMEOUT"
#define LIMIT_S 60
#define NS_PER_S INT64_C(1000000000)

static char directory[FSX_STATE_PATH];
int64_t fsx_limit_ns = LIMIT_S * NS_PER_S;

/* ---- requests ----------------------------------------------------------------------------------------------------------- */

static void put(struct fsx_request *request, const void *source, size_t bytes) {
    if (bytes > sizeof request->body - request->bytes) {
        request->spoiled = true;
        return;
    }
    memcpy(request->body + request->bytes, source, bytes);
    request->bytes += bytes;
}

/* A msgpack head: a byte and a number of so many bytes, big-endian. */
static void put_head(struct fsx_request *request, uint8_t head, uint64_t value, unsigned bytes) {
    uint8_t encoded[9] = {head};
    for (unsigned i = 0; i < bytes; i++)
        encoded[1 + i] = (uint8_t)(value >> (8 * (bytes - 1 - i)));
    put(request, encoded, 1 + bytes);
}

static void put_text(struct fsx_request *request, const char *text) {
    const size_t bytes = strlen(text);
    request->spoiled = request->spoiled || bytes > UINT16_MAX;
    put_head(request, 0xda, bytes, 2);
    put(request, text, bytes);
}

void fsx_request_start(struct fsx_request *request, const char *name, unsigned arguments) {
    request->name = name;
    request->bytes = 0;
    request->limits = 1;
    request->spoiled = arguments > UINT16_MAX - 1u;
    put_head(request, 0xde, arguments + 1, 2);
    fsx_request_text(request, "request", name);
}

void fsx_request_text(struct fsx_request *request, const char *key, const char *value) {
    put_text(request, key);
    put_text(request, value);
}

void fsx_request_bytes(struct fsx_request *request, const char *key, const void *value, size_t bytes) {
    put_text(request, key);
    request->spoiled = request->spoiled || bytes > UINT16_MAX;
    put_head(request, 0xc5, bytes, 2);
    put(request, value, bytes);
}

void fsx_request_number(struct fsx_request *request, const char *key, uint64_t value) {
    put_text(request, key);
    put_head(request, 0xcf, value, 8);
}

void fsx_request_flag(struct fsx_request *request, const char *key, bool value) {
    put_text(request, key);
    put_head(request, value ? 0xc3 : 0xc2, 0, 0);
}

/* ---- answers ------------------------------------------------------------------------------------------------------------ */

struct reader {
    const uint8_t *now, *end;
};

struct value {
    enum { NOTHING, NUMBER, TEXT } kind;
    uint64_t number;
    const uint8_t *text;
    size_t bytes;
};

static bool take_number(struct reader *reader, unsigned bytes, uint64_t *number) {
    if ((size_t)(reader->end - reader->now) < bytes)
        return false;
    *number = 0;
    while (bytes-- > 0)
        *number = *number << 8 | *reader->now++;
    return true;
}

/* The next value; one that is neither a number from 0 on, nor text, nor bytes is NOTHING. False for what is not understood:
 * lists and maps in an answer, and what ends too early. */
static bool take_value(struct reader *reader, struct value *value) {
    uint64_t head, bytes = 0;
    *value = (struct value){.kind = NOTHING};
    if (!take_number(reader, 1, &head))
        return false;
    if (head <= 0x7f) {
        *value = (struct value){.kind = NUMBER, .number = head};
        return true;
    }
    if (head == 0xc0 || head >= 0xe0) /* nil, small negative */
        return true;
    if (head == 0xc2 || head == 0xc3) {
        *value = (struct value){.kind = NUMBER, .number = head & 1};
        return true;
    }
    if (head >= 0xcc && head <= 0xcf) {
        value->kind = NUMBER;
        return take_number(reader, 1u << (head - 0xcc), &value->number);
    }
    if ((head >= 0xd0 && head <= 0xd3) || head == 0xca || head == 0xcb) { /* negative, or not whole */
        const unsigned width = head == 0xca ? 4 : head == 0xcb ? 8 : 1u << (head - 0xd0);
        return take_number(reader, width, &bytes);
    }
    if (head >= 0xa0 && head <= 0xbf)
        bytes = head & 0x1f;
    else if (head >= 0xc4 && head <= 0xc6 ? !take_number(reader, 1u << (head - 0xc4), &bytes)
                                          : head < 0xd9 || head > 0xdb || !take_number(reader, 1u << (head - 0xd9), &bytes))
        return false;
    if ((size_t)(reader->end - reader->now) < bytes)
        return false;
    *value = (struct value){.kind = TEXT, .text = reader->now, .bytes = (size_t)bytes};
    reader->now += bytes;
    return true;
}

/* The value of this name in the map that an answer is. */
static bool find(const struct fsx_answer *answer, const char *key, struct value *found) {
    struct reader reader = {answer->body, answer->body + answer->bytes};
    uint64_t head, count = 0;
    if (!take_number(&reader, 1, &head))
        return false;
    if (head >= 0x80 && head <= 0x8f)
        count = head & 0xf;
    else if (head != 0xde || !take_number(&reader, 2, &count))
        return false;
    for (; count > 0; count--) {
        struct value name;
        if (!take_value(&reader, &name) || !take_value(&reader, found))
            return false;
        if (name.kind == TEXT && name.bytes == strlen(key) && memcmp(name.text, key, name.bytes) == 0)
            return true;
    }
    return false;
}

bool fsx_answer_number(const struct fsx_answer *answer, const char *key, uint64_t *number) {
    struct value value;
    if (!find(answer, key, &value) || value.kind != NUMBER)
        return false;
    *number = value.number;
    return true;
}

bool fsx_answer_text(const struct fsx_answer *answer, const char *key, const char **text, size_t *bytes) {
    struct value value;
    if (!find(answer, key, &value) || value.kind != TEXT)
        return false;
    *text = (const char *)value.text;
    *bytes = value.bytes;
    return true;
}

void fsx_answer_close(struct fsx_answer *answer) {
    for (unsigned i = 0; i < answer->descriptors; i++)
        if (answer->descriptor[i] >= 0)
            syscall(SYS_close, answer->descriptor[i]);
    answer->descriptors = 0;
}

/* ---- packets ------------------------------------------------------------------------------------------------------------ */

static bool send_packet(int fd, uint32_t number, const struct fsx_request *request, int64_t end_ns) {
    uint8_t head[HEADER_BYTES] = {0};
    memcpy(head, &number, sizeof number);
    struct iovec parts[2] = {{head, sizeof head}, {(void *)(uintptr_t)request->body, request->bytes}};
    const struct msghdr message = {.msg_iov = parts, .msg_iovlen = 2};
    while (syscall(SYS_sendmsg, fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT) < 0) {
        if (errno == EINTR)
            continue;
        if (errno != EAGAIN || !fsx_wait_for(fd, POLLOUT, end_ns))
            return false;
    }
    return true;
}

/* One packet is the answer: false for anything else. */
static bool receive_packet(int fd, uint32_t number, struct fsx_answer *answer, int64_t end_ns) {
    uint8_t head[HEADER_BYTES];
    _Alignas(struct cmsghdr) char rights[CMSG_SPACE(FSX_ANSWER_DESCRIPTORS * sizeof(int))];
    struct iovec parts[2] = {{head, sizeof head}, {answer->body, sizeof answer->body}};
    struct msghdr message = {
        .msg_iov = parts, .msg_iovlen = 2, .msg_control = rights, .msg_controllen = sizeof rights};
    long got;
    while ((got = syscall(SYS_recvmsg, fd, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC)) < 0) {
        if (errno == EINTR)
            continue;
        if (errno != EAGAIN || !fsx_wait_for(fd, POLLIN, end_ns))
            return false;
    }
    for (struct cmsghdr *part = CMSG_FIRSTHDR(&message); part != NULL; part = CMSG_NXTHDR(&message, part)) {
        if (part->cmsg_level != SOL_SOCKET || part->cmsg_type != SCM_RIGHTS)
            continue;
        const size_t count = (part->cmsg_len - CMSG_LEN(0)) / sizeof(int);
        for (size_t i = 0; i < count && answer->descriptors < FSX_ANSWER_DESCRIPTORS; i++)
            memcpy(&answer->descriptor[answer->descriptors++], CMSG_DATA(part) + i * sizeof(int), sizeof(int));
    }
    uint32_t answered;
    memcpy(&answered, head, sizeof answered);
    /* The flags: no packet follows. */
    if (got < (long)HEADER_BYTES || (message.msg_flags & (MSG_TRUNC | MSG_CTRUNC)) != 0 || answered != number ||
        head[4] != 0 || head[5] != 0)
        return false;
    answer->bytes = (size_t)got - HEADER_BYTES;
    return true;
}

/* ---- connections -------------------------------------------------------------------------------------------------------- */

/* A socket to the daemon of this mount; -1 if it is not there, or somebody else's. */
static int reach(int64_t end_ns) {
    const int folder = (int)syscall(SYS_openat, AT_FDCWD, directory, O_PATH | O_DIRECTORY | O_CLOEXEC, 0);
    const int fd = (int)syscall(SYS_socket, AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    /* Its own path may be longer than an address. */
    snprintf(address.sun_path, sizeof address.sun_path, "/proc/self/fd/%d/control", folder);
    bool reached = folder >= 0 && fd >= 0;
    while (reached && syscall(SYS_connect, fd, &address, sizeof address) != 0) {
        /* All that may wait there do: it can be noticed only by trying again. */
        const struct timespec pause = {.tv_nsec = 10000000};
        reached = errno == EINTR || (errno == EAGAIN && (int64_t)fsx_now_ns() < end_ns);
        if (errno == EAGAIN)
            syscall(SYS_nanosleep, &pause, NULL);
    }
    struct {
        int pid;
        uid_t uid;
        gid_t gid;
    } peer;
    socklen_t bytes = sizeof peer;
    reached = reached && syscall(SYS_getsockopt, fd, SOL_SOCKET, SO_PEERCRED, &peer, &bytes) == 0 &&
              (peer.uid == fsx_at.state->uid || peer.uid == 0);
    if (folder >= 0)
        syscall(SYS_close, folder);
    if (!reached && fd >= 0)
        syscall(SYS_close, fd);
    return reached ? fd : -1;
}

/* One request on this connection; false if it is of no use any more. */
static bool exchange(struct fsx_socket *connection, const struct fsx_request *request, struct fsx_answer *answer,
                     int64_t end_ns) {
    const uint32_t number = ++connection->number;
    answer->bytes = 0;
    answer->descriptors = 0;
    const int fd = connection->open - 1;
    if (send_packet(fd, number, request, end_ns) && receive_packet(fd, number, answer, end_ns))
        return true;
    fsx_answer_close(answer);
    return false;
}

static bool greet(struct fsx_socket *connection, struct fsx_answer *answer, int64_t end_ns) {
    struct fsx_request hello;
    fsx_request_start(&hello, "hello", 2);
    fsx_request_number(&hello, "protocol", PROTOCOL);
    fsx_request_text(&hello, "client", "libfanstore-io");
    uint64_t spoken;
    if (!exchange(connection, &hello, answer, end_ns))
        return false;
    const bool understood = fsx_answer_number(answer, "protocol", &spoken) && spoken == PROTOCOL;
    fsx_answer_close(answer);
    return understood;
}

static bool connect_to_daemon(struct fsx_socket *connection, struct fsx_answer *answer, int64_t end_ns) {
    if (fsx_socket_is_open(FSX_ASKING, connection))
        return true;
    if (!fsx_socket_open(FSX_ASKING, connection, reach(end_ns)))
        return false;
    if (greet(connection, answer, end_ns))
        return true;
    fsx_socket_close(FSX_ASKING, connection);
    return false;
}

/* ---- asking ------------------------------------------------------------------------------------------------------------- */

bool fsx_ask_start(const char *state) {
    const int length = snprintf(directory, sizeof directory, "%s/..", state);
    if (length < 0 || (size_t)length >= sizeof directory)
        return false;
    const char *limit = getenv(LIMIT_VARIABLE);
    const long seconds = limit != NULL ? strtol(limit, NULL, 10) : 0;
    if (seconds > 0 && seconds < 1000000)
        fsx_limit_ns = seconds * NS_PER_S;
    return true;
}

/* What the daemon's error means for a program; 0 if it is none. */
static int error_of(const struct fsx_answer *answer) {
    const char *code;
    size_t bytes;
    uint64_t number;
    if (!fsx_answer_text(answer, "error", &code, &bytes))
        return 0;
    return fsx_answer_number(answer, "errno", &number) && number > 0 && number < 4096 ? (int)number : EIO;
}

/* The same in the child of a vfork, over a connection of its own: its descriptors are not those that the memory tells of. */
static int ask_once(const struct fsx_request *request, struct fsx_answer *answer) {
    const int kept = errno;
    const int64_t end_ns = (int64_t)fsx_now_ns() + fsx_limit_ns * request->limits;
    struct fsx_socket own = {.open = reach(end_ns) + 1};
    int error = EIO;
    if (own.open != 0) {
        if (greet(&own, answer, end_ns) && exchange(&own, request, answer, end_ns))
            error = error_of(answer);
        syscall(SYS_close, own.open - 1);
    }
    if (error != 0)
        fsx_answer_close(answer);
    errno = kept;
    return error;
}

int fsx_ask(const struct fsx_request *request, struct fsx_answer *answer) {
    answer->bytes = 0;
    answer->descriptors = 0;
    if (request->spoiled)
        return EIO;
    if (fsx_in_vfork())
        return ask_once(request, answer);
    const int kept = errno;
    const int64_t end_ns = (int64_t)fsx_now_ns() + fsx_limit_ns * request->limits;
    int error = EIO;
    uint64_t signals;
    struct fsx_socket *connection = fsx_socket_claim(FSX_ASKING, end_ns, &signals);
    if (connection != NULL) {
        if (connect_to_daemon(connection, answer, end_ns)) {
            if (exchange(connection, request, answer, end_ns))
                error = error_of(answer);
            else
                fsx_socket_close(FSX_ASKING, connection);
        }
        if (error != 0)
            fsx_answer_close(answer);
        fsx_socket_give_back(FSX_ASKING, connection, signals);
    }
    FSX_LOG("ask", request->name, error, error == 0 ? "answered" : "not answered");
    errno = kept;
    return error;
}

int fsx_ask_content(uint32_t entry) {
    struct fsx_request request;
    struct fsx_answer answer;
    fsx_request_start(&request, "content", 1);
    fsx_request_number(&request, "entry", entry);
    int error = fsx_ask(&request, &answer);
    if (error == 0 && answer.descriptors != 1) {
        fsx_answer_close(&answer);
        error = EIO;
    }
    if (error != 0) {
        errno = error;
        return -1;
    }
    return answer.descriptor[0];
}
