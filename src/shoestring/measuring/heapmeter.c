/* The heap meter's preloaded half: live bytes of all blocks that malloc and its kin gave out, and their peak.
 *
 * It stands before the allocator (LD_PRELOAD), passes every call on to the next one in line, be it glibc's or
 * another preloaded one, and counts what malloc_usable_size says of the block. The names of the three readers
 * at the end are those that other heap meters of this kind use, so that one reader serves all.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <malloc.h>
#include <stdatomic.h>
#include <stddef.h>
#include <string.h>
#include <unistd.h>

static struct {
    void *(*malloc)(size_t);
    void *(*calloc)(size_t, size_t);
    void *(*realloc)(void *, size_t);
    void *(*memalign)(size_t, size_t);
    void *(*aligned_alloc)(size_t, size_t);
    int (*posix_memalign)(void **, size_t, size_t);
    void (*free)(void *);
    size_t (*size)(void *);
} next;

static atomic_long live_bytes, peak_bytes;

/* dlsym may itself allocate. Those few blocks come from here, are never counted and never given back; static
 * memory is zero from the start, as calloc needs it. The loader runs one thread, so no lock is needed. */
static _Alignas(16) char nursery[16384];
static size_t nursery_used;

static int from_nursery(const void *block) {
    return (const char *)block >= nursery && (const char *)block < nursery + sizeof nursery;
}

static void *nurse(size_t size) {
    size = (size + 15) & ~(size_t)15;
    if (size > sizeof nursery - nursery_used) return NULL;
    void *block = nursery + nursery_used;
    nursery_used += size;
    return block;
}

static int ready(void) {
    static int asking;
    if (next.size) return 1;
    if (asking) return 0;
    asking = 1;
    next.malloc = dlsym(RTLD_NEXT, "malloc");
    next.calloc = dlsym(RTLD_NEXT, "calloc");
    next.realloc = dlsym(RTLD_NEXT, "realloc");
    next.memalign = dlsym(RTLD_NEXT, "memalign");
    next.aligned_alloc = dlsym(RTLD_NEXT, "aligned_alloc");
    next.posix_memalign = dlsym(RTLD_NEXT, "posix_memalign");
    next.free = dlsym(RTLD_NEXT, "free");
    next.size = dlsym(RTLD_NEXT, "malloc_usable_size");
    asking = 0;
    return 1;
}

static void change(long bytes) {
    long now = atomic_fetch_add_explicit(&live_bytes, bytes, memory_order_relaxed) + bytes;
    long top = atomic_load_explicit(&peak_bytes, memory_order_relaxed);
    while (now > top && !atomic_compare_exchange_weak(&peak_bytes, &top, now)) {}
}

static void *born(void *block) {
    if (block) change((long)next.size(block));
    return block;
}

void *malloc(size_t size) { return ready() ? born(next.malloc(size)) : nurse(size); }

void *calloc(size_t count, size_t size) {
    return ready() ? born(next.calloc(count, size)) : nurse(count * size);
}

void *memalign(size_t alignment, size_t size) {
    return ready() ? born(next.memalign(alignment, size)) : NULL;
}

void *aligned_alloc(size_t alignment, size_t size) {
    return ready() ? born(next.aligned_alloc(alignment, size)) : NULL;
}

int posix_memalign(void **block, size_t alignment, size_t size) {
    ready();
    int error = next.posix_memalign(block, alignment, size);
    if (!error) born(*block);
    return error;
}

void *valloc(size_t size) { return memalign((size_t)sysconf(_SC_PAGESIZE), size); }

void *pvalloc(size_t size) {
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    return memalign(page, (size + page - 1) / page * page);
}

void free(void *block) {
    if (!block || from_nursery(block)) return;
    ready();
    change(-(long)next.size(block));
    next.free(block);
}

void *realloc(void *block, size_t size) {
    if (!block) return malloc(size);
    if (from_nursery(block)) {
        size_t rest = (size_t)(nursery + sizeof nursery - (char *)block);
        void *moved = malloc(size);
        return moved ? memcpy(moved, block, size < rest ? size : rest) : NULL;
    }
    ready();
    long before = (long)next.size(block);
    void *moved = next.realloc(block, size);
    if (moved) change((long)next.size(moved) - before);
    else if (!size) change(-before); /* glibc: realloc to zero bytes frees */
    return moved;
}

long heapmeter_live(void) { return atomic_load(&live_bytes); }
long heapmeter_peak(void) { return atomic_load(&peak_bytes); }
void heapmeter_reset_peak(void) { atomic_store(&peak_bytes, atomic_load(&live_bytes)); }
