/*
 * A small HTTP/1.1 load client for scripts/bench: one thread, epoll, keep-alive, IPv4 only.
 *
 *   load HOST PORT --path PATH --bodies FILE [--connections N] [--requests N] [--stream] [--timeout S]
 *
 * FILE holds one JSON request body a line; requests take them in turn, from the first again when they are used up.
 * Every connection sends its next request when the answer to the one before is complete. With --stream an answer
 * is an SSE stream: a line that begins with "data: " is an event, "data: [DONE]" is none, 'data: {"error"' is a
 * failed request. Time to first token is that of the first event (or of the answer's first body byte); a gap is
 * the time between two reads that brought events.
 *
 * All connections are open before the clock starts. Prints one JSON line: counts, wall and own CPU seconds, and
 * percentiles in milliseconds. Exit code 0 unless it could not begin.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <getopt.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define MAX_HEAD 8192
#define MAX_GAPS 8000000
#define PREFIX 14 /* bytes of a line that tell what it is */

enum state { IDLE, WAITING, CLOSED };
enum framing { BY_LENGTH, CHUNKED };
enum chunk { SIZE, DATA, DATA_END, TRAILER };

struct connection {
    int fd;
    enum state state;
    double sent_at, first_at, last_at;
    /* the answer's head */
    char head[MAX_HEAD];
    int head_bytes, head_done, status, failed;
    /* its body */
    enum framing framing;
    long left; /* bytes still to come: of the body, or of this chunk */
    enum chunk chunk;
    int line_is_empty; /* of a chunk trailer */
    int complete;
    /* the line of the event stream */
    char line[PREFIX];
    int line_bytes, judged;
    long events;
};

struct bodies {
    char **start;
    size_t *bytes;
    long count;
};

static struct sockaddr_in address;
static const char *host, *path;
static struct bodies bodies;
static int epoll_fd, streaming;
static long wanted, issued, done_count, http_errors, connection_errors, event_errors, events, bytes_read;
static double *first_s, *total_s, *gap_s;
static long gaps;

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec * 1e-9;
}

static double cpu_s(void) {
    struct rusage r;
    getrusage(RUSAGE_SELF, &r);
    return r.ru_utime.tv_sec + r.ru_stime.tv_sec + (r.ru_utime.tv_usec + r.ru_stime.tv_usec) * 1e-6;
}

static void die(const char *what) {
    fprintf(stderr, "load: %s: %s\n", what, strerror(errno));
    exit(1);
}

static void *reserve(size_t count, size_t size) {
    void *memory = calloc(count ? count : 1, size);
    if (!memory) die("out of memory");
    return memory;
}

/* Cuts FILE into lines; empty ones do not count. */
static void read_bodies(const char *file) {
    FILE *f = fopen(file, "rb");
    if (!f) die(file);
    if (fseek(f, 0, SEEK_END)) die(file);
    long size = ftell(f);
    rewind(f);
    char *data = reserve(size + 1, 1);
    if (fread(data, 1, size, f) != (size_t)size) die(file);
    fclose(f);
    long lines = 1;
    for (long i = 0; i < size; i++) lines += data[i] == '\n';
    bodies.start = reserve(lines, sizeof *bodies.start);
    bodies.bytes = reserve(lines, sizeof *bodies.bytes);
    for (char *p = data, *end = data + size; p < end;) {
        char *newline = memchr(p, '\n', end - p);
        size_t length = (newline ? newline : end) - p;
        if (length) {
            bodies.start[bodies.count] = p;
            bodies.bytes[bodies.count++] = length;
        }
        p += length + 1;
    }
    if (!bodies.count) {
        fprintf(stderr, "load: %s holds no request body\n", file);
        exit(1);
    }
}

static void open_connection(struct connection *c) {
    int one = 1;
    c->fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (c->fd < 0) die("socket (is the limit of open files too low?)");
    setsockopt(c->fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    if (connect(c->fd, (void *)&address, sizeof address) < 0) die("connect");
    fcntl(c->fd, F_SETFL, O_NONBLOCK);
    struct epoll_event e = {.events = EPOLLIN, .data.ptr = c};
    if (epoll_ctl(epoll_fd, EPOLL_CTL_ADD, c->fd, &e)) die("epoll_ctl");
}

/* False when the connection is broken. Waits when the peer does not read: bodies are small next to its buffers. */
static int send_all(int fd, const char *data, size_t size) {
    while (size) {
        ssize_t n = write(fd, data, size);
        if (n > 0) {
            data += n;
            size -= n;
        } else if (n < 0 && errno == EAGAIN) {
            struct pollfd p = {.fd = fd, .events = POLLOUT};
            poll(&p, 1, 1000);
        } else if (!(n < 0 && errno == EINTR)) {
            return 0;
        }
    }
    return 1;
}

static void close_connection(struct connection *c) {
    close(c->fd);
    c->state = CLOSED;
}

/* Sends the next request. False when the connection is broken. */
static int start_request(struct connection *c) {
    static char *buffer;
    static size_t room;
    long body = issued++ % bodies.count;
    size_t needed = bodies.bytes[body] + strlen(path) + strlen(host) + 160;
    if (needed > room) {
        room = 2 * needed;
        buffer = realloc(buffer, room);
        if (!buffer) die("out of memory");
    }
    int head = snprintf(buffer, room,
                        "POST %s HTTP/1.1\r\nHost: %s\r\nContent-Type: application/json\r\nContent-Length: %zu\r\n\r\n",
                        path, host, bodies.bytes[body]);
    memcpy(buffer + head, bodies.start[body], bodies.bytes[body]);
    int fd = c->fd;
    memset(c, 0, sizeof *c);
    c->fd = fd;
    c->state = WAITING;
    c->sent_at = now();
    return send_all(fd, buffer, head + bodies.bytes[body]);
}

/* Takes bytes of the head; returns how many. */
static long take_head(struct connection *c, const char *p, long n) {
    for (long i = 0; i < n; i++) {
        if (c->head_bytes < MAX_HEAD - 1) c->head[c->head_bytes++] = p[i];
        if (c->head_bytes >= 4 && !memcmp(c->head + c->head_bytes - 4, "\r\n\r\n", 4)) {
            c->head[c->head_bytes] = 0;
            c->head_done = 1;
            c->status = c->head_bytes > 12 ? atoi(c->head + 9) : 0;
            char *length = strcasestr(c->head, "\r\ncontent-length:");
            c->framing = length ? BY_LENGTH : CHUNKED;
            c->left = length ? atol(length + 17) : 0;
            c->complete = length && c->left == 0;
            return i + 1;
        }
    }
    return n;
}

static void judge_line(struct connection *c) {
    c->judged = 1;
    if (c->line_bytes < 6 || memcmp(c->line, "data: ", 6)) return;
    if (c->line_bytes > 6 && c->line[6] == '[') return; /* [DONE] */
    c->events++;
    if (c->line_bytes == PREFIX && !memcmp(c->line, "data: {\"error\"", PREFIX)) c->failed = 1;
}

static void take_body(struct connection *c, const char *p, long n) {
    if (!streaming) return;
    for (const char *end = p + n; p < end;) {
        while (p < end && c->line_bytes < PREFIX && *p != '\n') c->line[c->line_bytes++] = *p++;
        if (c->line_bytes == PREFIX && !c->judged) judge_line(c);
        const char *newline = p < end ? memchr(p, '\n', end - p) : NULL;
        if (!newline) return;
        if (!c->judged) judge_line(c);
        c->line_bytes = c->judged = 0;
        p = newline + 1;
    }
}

static void take_chunked(struct connection *c, const char *p, long n) {
    for (const char *end = p + n; p < end && !c->complete;) {
        if (c->chunk == DATA) {
            long part = end - p < c->left ? end - p : c->left;
            take_body(c, p, part);
            p += part;
            if (!(c->left -= part)) c->chunk = DATA_END;
            continue;
        }
        char x = *p++;
        if (c->chunk == SIZE) {
            if (x == '\n') {
                c->chunk = c->left ? DATA : TRAILER;
                c->line_is_empty = 1;
            } else if (x != '\r') {
                c->left = c->left * 16 + (x <= '9' ? x - '0' : (x | 32) - 'a' + 10);
            }
        } else if (c->chunk == DATA_END) {
            if (x == '\n') c->chunk = SIZE;
        } else if (x == '\n') {
            c->complete = c->line_is_empty;
            c->line_is_empty = 1;
        } else if (x != '\r') {
            c->line_is_empty = 0;
        }
    }
}

static void note_times(struct connection *c, long events_before, int has_body, double t) {
    if (streaming ? c->events > events_before : has_body) {
        if (!c->first_at) c->first_at = t;
        else if (streaming && gaps < MAX_GAPS) gap_s[gaps++] = t - c->last_at;
        c->last_at = t;
    }
    events += c->events - events_before;
}

/* An answer is complete. False when there is nothing left for this connection to do. */
static int finish_request(struct connection *c, double t) {
    if (c->status != 200) http_errors++;
    if (c->failed) event_errors++;
    first_s[done_count] = (c->first_at ? c->first_at : t) - c->sent_at;
    total_s[done_count++] = t - c->sent_at;
    c->state = IDLE;
    if (issued >= wanted) return 0;
    if (start_request(c)) return 1;
    connection_errors++;
    close_connection(c);
    return 0;
}

/* Reads what there is. False when the connection's work is over. */
static int serve(struct connection *c) {
    static char buffer[1 << 18];
    long n = read(c->fd, buffer, sizeof buffer);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) return 1;
    if (c->state != WAITING) { /* closed by the server between two requests, or bytes nobody asked for */
        close_connection(c);
        return 1;
    }
    if (n <= 0) {
        connection_errors++;
        close_connection(c);
        return 0;
    }
    double t = now();
    bytes_read += n;
    long used = c->head_done ? 0 : take_head(c, buffer, n), before = c->events;
    if (c->head_done && used < n) {
        if (c->framing == CHUNKED) {
            take_chunked(c, buffer + used, n - used);
        } else {
            take_body(c, buffer + used, n - used);
            c->complete = (c->left -= n - used) <= 0;
        }
        note_times(c, before, 1, t);
    }
    return c->complete ? finish_request(c, t) : 1;
}

static int ascending(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

static void print_percentiles(const char *name, double *values, long count) {
    qsort(values, count, sizeof *values, ascending);
#define AT(q) (count ? values[(long)((count - 1) * (q))] * 1e3 : 0.0)
    printf(",\"%s\":{\"p50\":%.3f,\"p90\":%.3f,\"p99\":%.3f,\"max\":%.3f}", name, AT(.5), AT(.9), AT(.99), AT(1.));
}

int main(int argc, char **argv) {
    long connections = 1;
    double timeout_s = 300;
    const char *body_file = NULL;
    const struct option options[] = {
        {"connections", required_argument, NULL, 'c'}, {"requests", required_argument, NULL, 'n'},
        {"path", required_argument, NULL, 'p'},        {"bodies", required_argument, NULL, 'b'},
        {"stream", no_argument, NULL, 's'},            {"timeout", required_argument, NULL, 't'},
        {NULL, 0, NULL, 0},
    };
    wanted = 1;
    for (int option; (option = getopt_long(argc, argv, "", options, NULL)) != -1;) {
        if (option == 'c') connections = atol(optarg);
        else if (option == 'n') wanted = atol(optarg);
        else if (option == 'p') path = optarg;
        else if (option == 'b') body_file = optarg;
        else if (option == 's') streaming = 1;
        else if (option == 't') timeout_s = atof(optarg);
        else return 2;
    }
    if (argc - optind != 2 || !path || !body_file || connections < 1 || wanted < 1) {
        fprintf(stderr, "usage: load HOST PORT --path PATH --bodies FILE [--connections N] [--requests N] [--stream]"
                        " [--timeout S]\n");
        return 2;
    }
    host = argv[optind];
    address.sin_family = AF_INET;
    address.sin_port = htons(atoi(argv[optind + 1]));
    if (inet_pton(AF_INET, host, &address.sin_addr) != 1) {
        fprintf(stderr, "load: %s is not an IPv4 address\n", host);
        return 2;
    }
    read_bodies(body_file);
    first_s = reserve(wanted, sizeof *first_s);
    total_s = reserve(wanted, sizeof *total_s);
    gap_s = reserve(MAX_GAPS, sizeof *gap_s);
    epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    struct connection *all = reserve(connections, sizeof *all);
    for (long i = 0; i < connections; i++) open_connection(&all[i]);
    usleep(300000); /* let the server accept them all */

    double begin_cpu_s = cpu_s(), begin_s = now();
    long live = 0;
    for (long i = 0; i < connections && issued < wanted; i++) {
        if (start_request(&all[i])) {
            live++;
        } else {
            connection_errors++;
            close_connection(&all[i]);
        }
    }
    struct epoll_event ready[256];
    while (live > 0 && now() - begin_s < timeout_s) {
        int n = epoll_wait(epoll_fd, ready, 256, 200);
        for (int i = 0; i < n; i++) live -= !serve(ready[i].data.ptr);
    }
    double wall_s = now() - begin_s;
    printf("{\"wall_s\":%.4f,\"client_cpu_s\":%.4f,\"done\":%ld,\"unfinished\":%ld,\"http_errors\":%ld,"
           "\"event_errors\":%ld,\"connection_errors\":%ld,\"events\":%ld,\"bytes\":%ld",
           wall_s, cpu_s() - begin_cpu_s, done_count, live, http_errors, event_errors, connection_errors, events,
           bytes_read);
    print_percentiles("first_ms", first_s, done_count);
    print_percentiles("total_ms", total_s, done_count);
    print_percentiles("gap_ms", gap_s, gaps);
    printf("}\n");
    return 0;
}
