/* Preloaded into a service: records what it writes to its database and to sockets, and when its syncs begin and end.
 *
 * The records stand in the file POWER_TRACE in the order in which they took effect: a header, then the bytes written.
 * Syncs are not carried out, they take half a millisecond to two: a cut can then fall into any of them.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

enum { OTHER = 0, DATABASE = 1, LOG = 2, SOCKET = 3 };

struct header {
    char op; /* w: written, t: truncated to offset, b and e: a sync begins and ends, d: deleted */
    uint8_t kind;
    uint16_t fd;
    uint32_t length; /* of the bytes that follow */
    int64_t offset;
    int64_t sync; /* the number of a sync */
};

static pthread_mutex_t order = PTHREAD_MUTEX_INITIALIZER;
static int trace = -1;
static int64_t syncs;
static ssize_t (*real_pwrite)(int, const void *, size_t, off_t);
static ssize_t (*real_write)(int, const void *, size_t);
static ssize_t (*real_writev)(int, const struct iovec *, int);
static ssize_t (*real_send)(int, const void *, size_t, int);
static ssize_t (*real_sendmsg)(int, const struct msghdr *, int);
static int (*real_ftruncate)(int, off_t);
static int (*real_unlink)(const char *);

__attribute__((constructor)) static void begin(void) {
    real_pwrite = dlsym(RTLD_NEXT, "pwrite64");
    real_write = dlsym(RTLD_NEXT, "write");
    real_writev = dlsym(RTLD_NEXT, "writev");
    real_send = dlsym(RTLD_NEXT, "send");
    real_sendmsg = dlsym(RTLD_NEXT, "sendmsg");
    real_ftruncate = dlsym(RTLD_NEXT, "ftruncate64");
    real_unlink = dlsym(RTLD_NEXT, "unlink");
    trace = open(getenv("POWER_TRACE"), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    /* Out of the way of a program that closes the low descriptors it inherits. */
    trace = fcntl(trace, F_DUPFD_CLOEXEC, 900);
}

static int ends(const char *name, const char *with) {
    size_t all = strlen(name), end = strlen(with);
    return all >= end && !strcmp(name + all - end, with);
}

static int kind_of_name(const char *name) {
    return ends(name, "/mediator.db") ? DATABASE : ends(name, "/mediator.db-wal") ? LOG : OTHER;
}

static int kind_of(int fd) {
    char link[64], name[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, name, sizeof name - 1);
    if (length < 0)
        return OTHER;
    name[length] = 0;
    return strncmp(name, "socket:", 7) ? kind_of_name(name) : SOCKET;
}

static void record(char op, int kind, int fd, const struct iovec *parts, int count, size_t length, int64_t offset,
                   int64_t sync) {
    struct header head = {op, kind, fd, length, offset, sync};
    struct iovec all[64] = {{&head, sizeof head}};
    int used = 1;
    for (int i = 0; i < count && length && used < 64; i++) {
        size_t some = parts[i].iov_len < length ? parts[i].iov_len : length;
        all[used++] = (struct iovec){parts[i].iov_base, some};
        length -= some;
    }
    if (length || real_writev(trace, all, used) < 0)
        abort();
}

/* `call` returns how much it wrote; `at` is where. */
#define RECORDED(fd, parts, count, at, call)                                                                           \
    int kind = kind_of(fd);                                                                                            \
    if (kind == OTHER)                                                                                                 \
        return call;                                                                                                   \
    pthread_mutex_lock(&order);                                                                                        \
    int64_t offset = at;                                                                                               \
    ssize_t done = call;                                                                                               \
    int why = errno;                                                                                                   \
    if (done > 0)                                                                                                      \
        record('w', kind, fd, parts, count, done, offset, 0);                                                          \
    pthread_mutex_unlock(&order);                                                                                      \
    errno = why;                                                                                                       \
    return done

static int64_t position(int fd) {
    struct stat about;
    if (fcntl(fd, F_GETFL) & O_APPEND)
        return fstat(fd, &about) ? 0 : about.st_size;
    return lseek(fd, 0, SEEK_CUR);
}

ssize_t pwrite64(int fd, const void *bytes, size_t length, off_t where) {
    struct iovec part = {(void *)bytes, length};
    RECORDED(fd, &part, 1, where, real_pwrite(fd, bytes, length, where));
}

ssize_t pwrite(int fd, const void *bytes, size_t length, off_t where) { return pwrite64(fd, bytes, length, where); }

ssize_t write(int fd, const void *bytes, size_t length) {
    struct iovec part = {(void *)bytes, length};
    RECORDED(fd, &part, 1, position(fd), real_write(fd, bytes, length));
}

ssize_t writev(int fd, const struct iovec *parts, int count) {
    RECORDED(fd, parts, count, position(fd), real_writev(fd, parts, count));
}

ssize_t send(int fd, const void *bytes, size_t length, int flags) {
    struct iovec part = {(void *)bytes, length};
    RECORDED(fd, &part, 1, 0, real_send(fd, bytes, length, flags));
}

ssize_t sendmsg(int fd, const struct msghdr *message, int flags) {
    RECORDED(fd, message->msg_iov, message->msg_iovlen, 0, real_sendmsg(fd, message, flags));
}

int ftruncate64(int fd, off_t length) {
    int kind = kind_of(fd);
    if (kind == OTHER)
        return real_ftruncate(fd, length);
    pthread_mutex_lock(&order);
    int done = real_ftruncate(fd, length), why = errno;
    if (!done)
        record('t', kind, fd, NULL, 0, 0, length, 0);
    pthread_mutex_unlock(&order);
    errno = why;
    return done;
}

int ftruncate(int fd, off_t length) { return ftruncate64(fd, length); }

int unlink(const char *name) {
    int kind = kind_of_name(name);
    if (kind == OTHER)
        return real_unlink(name);
    pthread_mutex_lock(&order);
    int done = real_unlink(name), why = errno;
    if (!done)
        record('d', kind, 0, NULL, 0, 0, 0, 0);
    pthread_mutex_unlock(&order);
    errno = why;
    return done;
}

int fdatasync(int fd) {
    int kind = kind_of(fd);
    if (kind != DATABASE && kind != LOG)
        return 0;
    pthread_mutex_lock(&order);
    int64_t number = ++syncs;
    record('b', kind, fd, NULL, 0, 0, 0, number);
    pthread_mutex_unlock(&order);
    usleep(500 + number * 7919 % 1500);
    pthread_mutex_lock(&order);
    record('e', kind, fd, NULL, 0, 0, 0, number);
    pthread_mutex_unlock(&order);
    return 0;
}

int fsync(int fd) { return fdatasync(fd); }
