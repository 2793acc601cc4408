/* Shared definitions of the soak program. One process is the server, the other the client. Both
 * issue operations on all connections, and verify completions and data. */
#ifndef SOAK_H
#define SOAK_H

#include <infiniband/verbs.h>
#include <rdma/rdma_cma.h>
#include <stdint.h>

enum {
	PAIRS = 64, /* connections that the client keeps open */
	PLACES = 3 * PAIRS, /* connections, including those that are being torn down */
	DEPTH = 16, /* outstanding requests of a connection */
	CREDITS = 16, /* messages that the peer may leave unacknowledged */
	RECEIVES = 48, /* receives of a connection: for messages and acknowledgements */
	/* receives of the shared receive queue, which every other connection uses */
	SHARED = 32 * RECEIVES,
	MESSAGE = 4096, /* length of the longest Send */
	SLOT = 32768, /* length of the longest Write or Read */
	SLOTS = 4, /* areas for Writes of each kind */
	WINDOW = 2048, /* length of the memory window */
	ACKNOWLEDGE = 4, /* messages per acknowledgement */
};

/* Memory that the peer may access. */
struct exposed {
	char written[SLOTS][SLOT]; /* the peer writes here and reads it back */
	char announced[SLOTS][SLOT]; /* the peer writes here with immediate data */
	char read[SLOT]; /* never changes */
	char window[WINDOW]; /* accessible only through the memory window */
	uint64_t counter; /* for atomic operations */
};

struct arena {
	struct exposed exposed;
	char out[DEPTH][SLOT];
	char in[RECEIVES][MESSAGE];
};

/* The private data of a connection request: the sender's `exposed` memory, and the seed of its
 * data. */
struct hello {
	uint64_t addr, seed;
	uint32_t rkey, index;
};

enum kind { SEND, WRITE, READ_BACK, WRITE_IMM, READ, FETCH_ADD, COMPARE_SWAP, BIND, LOCAL_INV,
	    WRITE_WINDOW, SEND_INV, KINDS };

struct request {
	enum kind kind;
	int posted, signaled, slot;
	uint32_t length, number; /* `number`: part of the wr_id, unique per request */
	uint64_t seed, expected; /* of the content; result of an atomic operation */
};

enum state { NONE, RESOLVING, CONNECTING, LIVE, DRAINING };

struct pair {
	enum state state;
	int index, shared, farewell_sent, farewell_received, disconnected, last_receive;
	/* clear until the first message arrives at the server, because the client may not know the
	 * server's parameters before it has sent a message */
	int may_speak;
	struct rdma_cm_id *id;
	struct ibv_mr *mr;
	struct ibv_mw *mw;
	struct arena *arena;
	/* seeds of the contents, and the address of the peer's `exposed` memory */
	uint64_t mine, theirs, remote;
	uint32_t rkey;
	struct request requests[DEPTH];
	unsigned char order[DEPTH]; /* posted requests, oldest first */
	int in_flight, received_posted;
	unsigned char receive_posted[RECEIVES];
	uint64_t sent, acknowledged, received, unacknowledged; /* counts of messages */
	int slot_busy[SLOTS];
	uint64_t announced_until[SLOTS]; /* the slot is free when this message is acknowledged */
	uint64_t counter; /* expected value of the peer's counter, after all posted operations */
	uint32_t window_key; /* key of the window that the peer may write to */
	int window_open;
	uint32_t offer; /* key of a window that the peer has offered and that is unused */
	const char *failure; /* status of a failed completion that was not handled yet */
	uint64_t since; /* time in milliseconds at which the pair entered its state */
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
/* reports an error and exits */
void wrong(const char *format, ...) __attribute__((format(printf, 1, 2), noreturn));

/* content.c */
void fill(void *to, uint32_t length, uint64_t seed, uint64_t offset);
void verify(const void *from, uint32_t length, uint64_t seed, uint64_t offset, const struct pair *p,
	    const char *what);

/* operations.c */
void start_operations(struct pair *p);
void issue(struct pair *p); /* posts a few operations of random kinds */
/* returns whether nothing is posted and all messages are acknowledged */
int idle(const struct pair *p);
void say_farewell(struct pair *p);
void post_shared(int place);
int poll_completions(void); /* polls completions; returns their number */
void handle_failures(void); /* gives up the connections that have failed completions */

/* connections.c */
int open_common(struct ibv_context *verbs);
void listen_at(const char *address, int port);
void keep_connected(const char *address, int port); /* opens missing connections (client) */
void churn(int count); /* closes `count` connections gracefully (client) */
int connection_events(void);
void asynchronous_events(void);
void advance_connections(void); /* frees drained connections, and detects connections that hang */
void lose(struct pair *p, const char *why);
int count(enum state state);

#endif
