/* Load libstores.so, and check every length and alignment of a copy: stores_check LIBRARY
 *
 * For kinds of CPU that this machine emulates only, where no Python with torch runs. Prints the number of copies.
 */

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

enum { BLOCKS = 3, SOURCE = 512, TARGET = 2048, MOST = 300, EDGES = 66 };

typedef int stack_function(char *to, const char *const *from, size_t count, size_t bytes);

static unsigned char source[BLOCKS][SOURCE], target[TARGET];

/* Return whether the copy has every byte, and no byte around it has changed. */
static int is_right(stack_function *stack, size_t bytes, size_t to, size_t from)
{
    const char *blocks[BLOCKS];
    for (size_t i = 0; i < BLOCKS; i++)
        blocks[i] = (const char *)source[i] + from;
    memset(target, 7, TARGET);
    if (stack((char *)target + to, blocks, BLOCKS, bytes) != 0)
        return 0;
    for (size_t at = 0; at < TARGET; at++) {
        int inside = at >= to && at < to + BLOCKS * bytes;
        size_t block = inside ? (at - to) / bytes : 0;
        unsigned char wanted = inside ? source[block][from + (at - to) % bytes] : 7;
        if (target[at] != wanted)
            return 0;
    }
    return 1;
}

int main(int argc, char **argv)
{
    void *library = argc == 2 ? dlopen(argv[1], RTLD_NOW) : NULL;
    stack_function *stack = library ? (stack_function *)dlsym(library, "numapin_stack_past_caches") : NULL;
    if (!stack) {
        fprintf(stderr, "%s\n", argc == 2 ? dlerror() : "usage: stores_check LIBRARY");
        return 2;
    }
    for (size_t i = 0; i < BLOCKS; i++)
        for (size_t at = 0; at < SOURCE; at++)
            source[i][at] = (unsigned char)(at * 31 + i * 101 + at / 256);
    int copies = 0;
    for (size_t bytes = 0; bytes < MOST; bytes += bytes < 140 ? 1 : 7)
        for (size_t edge = 0; edge < EDGES; edge += 5)
            for (size_t from = 0; from < 20; from += 3, copies++)
                if (!is_right(stack, bytes, edge, from)) {
                    fprintf(stderr, "wrong: %zu bytes, target + %zu, source + %zu\n", bytes, edge, from);
                    return 1;
                }
    printf("%d copies are right\n", copies);
    return 0;
}
