/* Copy blocks of memory one after the other, with stores that bypass the caches.
 *
 * An ordinary store to an uncached line reads the line first, and writes it back later. If a GPU reads the memory next,
 * and no CPU, writing the line directly is better: the copy causes a third less traffic on the memory bus, which the
 * GPU's own reads need. Intel's optimization manual calls these non-temporal stores. On aarch64 they are STNP (Arm's
 * architecture reference manual, C3.2.4), which is a hint to the CPU.
 */

#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum { LINE = 64 };

#if defined(__x86_64__)
#include <emmintrin.h>

static void copy_line(char *to, const char *from)
{
    const __m128i *source = (const __m128i *)from;
    __m128i a = _mm_loadu_si128(source), b = _mm_loadu_si128(source + 1);
    __m128i c = _mm_loadu_si128(source + 2), d = _mm_loadu_si128(source + 3);
    __m128i *target = (__m128i *)to;
    _mm_stream_si128(target, a);
    _mm_stream_si128(target + 1, b);
    _mm_stream_si128(target + 2, c);
    _mm_stream_si128(target + 3, d);
}

static void order(void)
{
    _mm_sfence();
}
#elif defined(__aarch64__)
static void copy_line(char *to, const char *from)
{
    __asm__ volatile("ldp q0, q1, [%1]\n\t"
                     "ldp q2, q3, [%1, #32]\n\t"
                     "stnp q0, q1, [%0]\n\t"
                     "stnp q2, q3, [%0, #32]"
                     :
                     : "r"(to), "r"(from)
                     : "v0", "v1", "v2", "v3", "memory");
}

static void order(void)
{
    __asm__ volatile("dmb oshst" ::: "memory"); /* outer shareable: devices see the stores in this order, too */
}
#else
#error "no stores for this kind of CPU; numapin works without this library"
#endif

static void copy(char *to, const char *from, size_t bytes)
{
    size_t head = -(uintptr_t)to % LINE;
    if (head > bytes)
        head = bytes;
    memcpy(to, from, head);

    size_t at = head;
    for (; at + LINE <= bytes; at += LINE)
        copy_line(to + at, from + at);
    memcpy(to + at, from + at, bytes - at);
}

/* `from` has the addresses of `count` blocks of `bytes` each. The copy is ordered before later stores.
 * Returns 0, because the caller expects a status. Rename the function if its arguments change: a source tree may still
 * contain a library of an earlier build. */
int numapin_stack_past_caches(char *to, const char *const *from, size_t count, size_t bytes)
{
    for (size_t i = 0; i < count; i++)
        copy(to + i * bytes, from[i], bytes);
    order();
    return 0;
}
