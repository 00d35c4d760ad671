/* A simulation of a loaded parallel file system (LD_PRELOAD): each metadata call waits SLOW_FILES_US.

   The file SLOW_FILES_COUNT counts opens and other metadata calls: 16 bytes that all processes of a node share. Calls of
   the dynamic linker are not counted. /proc, /sys, /dev and the folder SLOW_FILES_QUICK are not slowed down. */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static uint64_t *count;
static long wait_us;
static const char *quick;

__attribute__((constructor)) static void begin(void) {
    const char *path = getenv("SLOW_FILES_COUNT"), *us = getenv("SLOW_FILES_US");
    wait_us = us ? atol(us) : 0;
    quick = getenv("SLOW_FILES_QUICK");
    /* What unpacks does so by relative names, on the node's own disk. */
    if (!strcmp(program_invocation_short_name, "tar")) wait_us = 0, path = 0;
    int file = path ? (int)syscall(SYS_openat, AT_FDCWD, path, O_RDWR) : -1;
    void *at = file >= 0 ? mmap(0, 16, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0) : MAP_FAILED;
    count = at == MAP_FAILED ? 0 : at;
    if (file >= 0) close(file);
}

static void called(const char *path, int asks) {
    if (path && (!strncmp(path, "/proc", 5) || !strncmp(path, "/sys", 4) || !strncmp(path, "/dev", 4))) return;
    if (path && quick && !strncmp(path, quick, strlen(quick))) return;
    if (count) __atomic_fetch_add(count + asks, 1, __ATOMIC_RELAXED);
    if (wait_us) {
        struct timespec t = {wait_us / 1000000, wait_us % 1000000 * 1000};
        nanosleep(&t, 0);
    }
}

#define OPENED 0
#define ASKED 1
#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define MODE(flags) \
    mode_t mode = 0; \
    if (flags & (O_CREAT | __O_TMPFILE)) { va_list more; va_start(more, flags); mode = va_arg(more, mode_t); va_end(more); }

int open(const char *p, int f, ...) { MODE(f) called(p, OPENED); return REAL(open)(p, f, mode); }
int open64(const char *p, int f, ...) { MODE(f) called(p, OPENED); return REAL(open64)(p, f, mode); }
int openat(int d, const char *p, int f, ...) { MODE(f) called(p, OPENED); return REAL(openat)(d, p, f, mode); }
int openat64(int d, const char *p, int f, ...) { MODE(f) called(p, OPENED); return REAL(openat64)(d, p, f, mode); }
DIR *opendir(const char *p) { called(p, OPENED); return REAL(opendir)(p); }
int stat(const char *p, struct stat *s) { called(p, ASKED); return REAL(stat)(p, s); }
int stat64(const char *p, struct stat64 *s) { called(p, ASKED); return REAL(stat64)(p, s); }
int lstat(const char *p, struct stat *s) { called(p, ASKED); return REAL(lstat)(p, s); }
int lstat64(const char *p, struct stat64 *s) { called(p, ASKED); return REAL(lstat64)(p, s); }
int fstatat(int d, const char *p, struct stat *s, int f) { called(p, ASKED); return REAL(fstatat)(d, p, s, f); }
int fstatat64(int d, const char *p, struct stat64 *s, int f) { called(p, ASKED); return REAL(fstatat64)(d, p, s, f); }
int access(const char *p, int m) { called(p, ASKED); return REAL(access)(p, m); }
ssize_t readlink(const char *p, char *b, size_t n) { called(p, ASKED); return REAL(readlink)(p, b, n); }
