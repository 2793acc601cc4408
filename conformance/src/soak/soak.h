/* Shared definitions of the soak program. One process is the server, another the client; both issue
 * operations on all connections and verify the completions. */
#ifndef SOAK_H
#define SOAK_H

#include <infiniband/verbs.h>
#include <rdma/rdma_cma.h>
#include <stdint.h>

enum {
	PAIRS = 64, /* connections that the client keeps open */
	PLACES = 3 * PAIRS, /* connections at a time, with those that are being torn down */
	DEPTH = 16, /* requests of a connection at a time */
	CREDITS = 16, /* messages that the peer has not acknowledged */
	RECEIVES = 48, /* receives of a connection: credits, and the acknowledgements of ours */
	/* receives of the shared receive queue, which each second connection uses */
	SHARED = 32 * RECEIVES,
	MESSAGE = 4096, /* octets of the longest Send */
	SLOT = 32768, /* octets of the longest Write or Read */
	SLOTS = 4, /* areas for Writes of each kind */
	WINDOW = 2048, /* octets of the memory window */
	ACKNOWLEDGE = 4, /* messages that are acknowledged together */
};

/* Memory that the peer may access. */
struct reach {
	char written[SLOTS][SLOT]; /* by Writes, and read back */
	char announced[SLOTS][SLOT]; /* by Writes with immediate data */
	char read[SLOT]; /* never changes */
	char window[WINDOW]; /* behind the memory window only */
	uint64_t counter; /* for atomic operations */
};

struct arena {
	struct reach reach;
	char out[DEPTH][SLOT];
	char in[RECEIVES][MESSAGE];
};

/* The private data of a connection request: the sender's `reach`, and the seed of its data. */
struct hello {
	uint64_t addr, seed;
	uint32_t rkey, index;
};

enum kind { SEND, WRITE, READ_BACK, WRITE_IMM, READ, FETCH_ADD, COMPARE_SWAP, BIND, LOCAL_INV,
	    WRITE_WINDOW, SEND_INV, KINDS };

struct request {
	enum kind kind;
	int posted, signaled, slot;
	uint32_t length, number; /* the number in its wr_id, which no other request has */
	uint64_t seed, expected; /* of the content, and the value that an atomic operation finds */
};

enum state { NONE, RESOLVING, CONNECTING, LIVE, DRAINING };

struct pair {
	enum state state;
	int index, shared, farewell, heard_farewell, disconnected, last_receive;
	/* the server waits for the client's first message, because the client then knows what to
	 * expect */
	int may_speak;
	struct rdma_cm_id *id;
	struct ibv_mr *mr;
	struct ibv_mw *mw;
	struct arena *arena;
	/* seeds of contents, and the address of the peer's `reach` */
	uint64_t mine, theirs, remote;
	uint32_t rkey;
	struct request requests[DEPTH];
	unsigned char order[DEPTH]; /* posted requests, oldest first */
	int in_flight, received_posted;
	unsigned char receive_posted[RECEIVES];
	uint64_t sent, acknowledged, received, unacknowledged; /* numbers of messages */
	int slot_busy[SLOTS];
	uint64_t announced_until[SLOTS]; /* free when this message is acknowledged */
	uint64_t counter; /* of the peer, after all posted operations */
	uint32_t window_key; /* of the window that the peer may write to */
	int window_open;
	uint32_t offer; /* a window of the peer's that we have not used yet */
	const char *failure; /* a completion says so, and the connection is not lost yet */
	uint64_t since; /* milliseconds, when it came into this state */
};

struct totals {
	uint64_t done[KINDS], messages, announced, invalidated;
	uint64_t made, closed, lost, attempts_failed, flushed, other_errors;
};

extern struct pair pairs[PLACES];
extern struct totals totals;
extern struct ibv_pd *pd;
extern struct ibv_srq *srq;
extern struct ibv_cq *queues[2];
extern struct ibv_comp_channel *completions;

/* main.c */
uint64_t now_ms(void);
uint64_t number(void); /* the next random number */
void say(const char *format, ...) __attribute__((format(printf, 1, 2)));
/* reports a broken promise and exits */
void wrong(const char *format, ...) __attribute__((format(printf, 1, 2), noreturn));

/* content.c */
void fill(void *to, uint32_t length, uint64_t seed, uint64_t offset);
void verify(const void *from, uint32_t length, uint64_t seed, uint64_t offset, const struct pair *p,
	    const char *what);

/* operations.c */
void start_operations(struct pair *p);
void issue(struct pair *p); /* posts a few operations of random kinds */
int idle(const struct pair *p); /* nothing posted, and all messages acknowledged */
void say_farewell(struct pair *p);
void post_shared(int place);
int reap(void); /* takes completions; returns how many */
void judge(void); /* loses the connections whose completions have said that they failed */

/* connections.c */
int open_common(struct ibv_context *verbs);
void listen_at(const char *address, int port);
void keep_connected(const char *address, int port); /* the client's part: opens what is missing */
void churn(int count); /* closes connections of the client gracefully */
int connection_events(void);
void asynchronous_events(void);
void tend(void); /* ends what has drained, and finds what hangs */
void lose(struct pair *p, const char *why);
int count(enum state state);

#endif
