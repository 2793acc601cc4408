/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * The interface between the engine (kernel/rust) and the C code of a kernel module: rk_* are
 * functions of the engine, iwarp_* are functions that the module provides.
 *
 * The functions under "Process context" may sleep. All others may also be called in softirq; they
 * neither allocate nor sleep. Pointers are not NULL unless noted. The engine takes no locks; the
 * caller must serialize its calls:
 *
 * - No other call with a device may run during a call that takes it as `struct rk_device *`. Calls
 *   that take it as `const struct rk_device *` may run concurrently.
 * - Calls with the same `struct rk_qp *` must not run concurrently.
 *
 * Errors are negative error numbers.
 */
#ifndef IWARP_ENGINE_H
#define IWARP_ENGINE_H

#include <linux/types.h>
#include <linux/uio.h>

struct rk_device;
struct rk_area;
struct rk_qp;
struct rk_mpa;
struct rk_slots;

/* Number of counters of a queue pair. */
#define RK_COUNTERS 16

/* Maximum number of scatter/gather elements of a receive, as in siw-abi.h. */
#define RK_RECEIVE_SGES 6

/* Access rights of a region, as in ib_verbs.h. */
enum rk_access {
	RK_LOCAL_WRITE = 1,
	RK_REMOTE_WRITE = 2,
	RK_REMOTE_READ = 4,
};

enum rk_op {
	RK_SEND,
	RK_SEND_INV,
	RK_WRITE,
	RK_READ,
	RK_LOCAL_INV,
	RK_FAST_REG,
	RK_READ_INV,	/* Read, then invalidate the STag of its only element */
	RK_WRITE_IMM,	/* RFC 7306 */
	RK_SEND_IMM,	/* the immediate data are a separate message before the Send */
};

enum rk_send_flags {
	RK_FENCE = 1,
	RK_SIGNALED = 2,
	RK_SOLICITED = 4,
	RK_INLINE = 8,
};

/* Statuses, and an opcode, of the completions that the C code writes itself. */
enum rk_wc {
	RK_WC_LOC_QP_OP_ERR = 2,
	RK_WC_WR_FLUSH_ERR = 4,
	RK_WC_RECV = 8,		/* the opcode */
};

/* Flags of a completion. */
enum rk_wc_flags {
	RK_WC_WITH_IMM = 1 << 1,
	RK_WC_WITH_INV = 1 << 3,
	RK_WC_SOLICITED = 1 << 8,
};

/* Returned by rk_qp_state(); values as in ib_verbs.h. */
enum rk_state {
	RK_STATE_RESET,
	RK_STATE_INIT,
	RK_STATE_RTR,
	RK_STATE_RTS,
	RK_STATE_SQD,
	RK_STATE_SQE,
	RK_STATE_ERROR,
};

/*
 * Returned by rk_qp_wish(): what the caller is to do with the stream. Any call with the queue pair
 * may change it, so query it after each of them.
 */
enum rk_wish {
	RK_WISH_KEEP,
	/*
	 * Shut down the sending side, then call rk_qp_shutdown_done(). Continue reading. When the
	 * peer has closed its side as well, call rk_rx_eof() and rk_qp_stream_gone().
	 */
	RK_WISH_SHUTDOWN,
	RK_WISH_LEAVE,		/* close the stream, then rk_qp_stream_gone() */
	RK_WISH_ABORT,		/* reset the stream, then rk_qp_stream_gone() */
};

/* Returned by rk_tx_fill(). */
enum rk_fill {
	RK_FILL_IDLE,		/* nothing to send */
	RK_FILL_READY,		/* the plan contains data: call rk_tx_runs() */
	RK_FILL_MEMORY,		/* a request changes the memory table: call rk_tx_memory() */
	RK_FILL_MORE,		/* the call's budget is used up: call rk_tx_fill() again */
};

/* Returned by rk_rx_filled() and rk_rx_input(), unless they return an error number. */
enum rk_rx {
	RK_RX_OK,
	RK_RX_HELD,		/* a Send waits for a receive: read nothing until one is posted */
	/*
	 * The peer has invalidated memory that is still in use: read nothing until the call of
	 * rk_retry_memory().
	 */
	RK_RX_WAITS,
};

/* Returned by rk_rx_interest(). */
enum rk_rx_interest {
	RK_RX_READ,
	RK_RX_WAIT,		/* read nothing now */
	RK_RX_DISCARD,		/* read and discard */
	RK_RX_NONE,		/* there is no stream */
};

/* Returned by rk_take_events(), combined by OR. */
enum rk_event {
	RK_EVENT_SQ_DRAINED = 2,
	RK_EVENT_FATAL = 4,
	RK_EVENT_ACCESS = 8,
	RK_EVENT_REQUEST = 16,
	RK_EVENT_LAST_WQE = 32,
	RK_EVENT_MESSAGE_IN_RTR = 256,
};

/* A value of `hold_ms`: a Send that finds no posted receive ends the connection at once. */
#define RK_HOLD_NOT U32_MAX

struct rk_qp_config {
	u32 qp_num;
	u32 pd;
	u32 max_send_wr;
	u32 max_recv_wr;
	u32 most_completions;	/* limit for each call of rk_complete_due(); 0: 256 */
	u32 hold_ms;		/* how long a Send waits for a receive, or RK_HOLD_NOT; 0: 2000 */
	u32 max_sge;
	u32 max_inline;
	u16 max_ird;
	u16 max_ord;
	u32 signal_all;
	u32 shared_receive;	/* the engine calls iwarp_take_receive() */
};

struct rk_stream {
	u32 initiator;
	u32 crc;
	u32 markers;
	u16 ird;
	u16 ord;
	u32 emss;
	u32 first_fpdu_ms;	/* a responder's time limit for the first FPDU; 0: none */
};

/* Returned by rk_poll_at() if no timer is set. */
#define RK_NEVER U64_MAX

struct rk_sge {
	u64 addr;
	u32 len;
	u32 lkey;
};

struct rk_send {
	u64 wr_id;
	u64 remote_addr;	/* fast registration: tagged offset of the first byte */
	u64 len;		/* fast registration: bytes */
	const struct rk_sge *sges;
	u32 num_sge;
	u32 op;
	u32 flags;
	u32 rkey;		/* the peer's STag, or the STag to register or invalidate */
	/*
	 * Fast registration: access rights, the offset in the first page (iova & (page_size - 1)),
	 * and the number of pages that ib_map_mr_sg() has put into the region's list. The list
	 * entries and pages must not change until the invalidation of the registration is complete
	 * or rk_deregister() has returned.
	 */
	u32 access;
	u32 first;
	u32 num_pages;
	u32 page_shift;
	const u8 *inline_data;	/* RK_INLINE: copied by the call */
	u32 inline_len;
	u32 imm;		/* immediate data */
};

struct rk_receive {
	u64 wr_id;
	u32 num_sge;
	struct rk_sge sges[RK_RECEIVE_SGES];
};

/*
 * What this side requests in MPA start-up. The negotiation lowers the depths to what both sides
 * support.
 */
struct rk_mpa_params {
	u32 revision;
	u32 crc;
	u32 markers;
	u32 peer_to_peer;
	u16 ird;
	u16 ord;
	u16 max_ird;
	u16 max_ord;
};

/*
 * Contents of the peer's MPA frame. `ird` and `ord` are the peer's depths in a request, and the
 * negotiated depths, from this side's point of view, in a reply.
 */
struct rk_mpa_peer {
	const u8 *private_data;
	u32 private_data_len;
	u16 ird;
	u16 ord;
};

/* Opcode of a completion. The engine does not compile if its numbers (WcOpcode) differ. */
enum rk_opcode {
	RK_OP_SEND,
	RK_OP_WRITE,
	RK_OP_READ,
	RK_OP_COMPARE_SWAP,
	RK_OP_FETCH_ADD,
	RK_OP_BIND,
	RK_OP_LOCAL_INVALIDATE,
	RK_OP_FAST_REGISTER,
	RK_OP_ATOMIC_WRITE,
	RK_OP_RECEIVE,
	RK_OP_RECEIVE_WRITE_IMM,
};

struct rk_completion {
	u64 wr_id;
	u32 status;		/* 0: success */
	u32 opcode;		/* enum rk_opcode */
	u32 byte_len;
	u32 imm_or_stag;
	u32 flags;
	u32 vendor_err;
};

/*
 * Process context. Functions that create an object return NULL or 0 if there is no memory or an
 * argument is not valid.
 */
struct rk_device *rk_device_new(void);
void rk_device_free(struct rk_device *device);	/* NULL is allowed */
/*
 * A registration allocates memory if the table has no free slot. Where it must not, add slots
 * before: if rk_slots_lacking() returns true, call rk_slots_make(), then rk_slots_attach(). Only
 * rk_slots_make() allocates. rk_slots_free() frees slots that were not attached.
 */
struct rk_slots *rk_slots_new(void);
void rk_slots_free(struct rk_slots *slots);	/* NULL is allowed */
bool rk_slots_lacking(const struct rk_device *device, struct rk_slots *slots);
int rk_slots_make(struct rk_slots *slots);
void rk_slots_attach(struct rk_device *device, struct rk_slots *slots);
u32 rk_register(struct rk_device *device, u64 addr, u64 len, u32 pd, u32 access, u32 random);
/*
 * Registers pages that need not be contiguous. `list` contains the address of each page, and
 * `first` is the offset in the first page. The list and the pages must stay valid until
 * rk_deregister() has returned.
 */
u32 rk_register_pages(struct rk_device *device, const u64 *list, u64 first, u64 len, u64 iova,
		      u32 pd, u32 access, u32 random);
/*
 * As ib_alloc_mr() for `most_pages` pages. `list` has room for their addresses; the caller may
 * change it between registrations.
 */
u32 rk_allocate_fast(struct rk_device *device, const u64 *list, u32 most_pages, u32 pd, u32 random);
int rk_deregister(struct rk_device *device, u32 stag);
struct rk_qp *rk_qp_new(const struct rk_qp_config *config, void *owner);
void rk_qp_free(struct rk_qp *qp);		/* NULL is allowed; take back its area before */
/*
 * A work area takes half a megabyte, so queue pairs share areas. A queue pair sends and receives
 * only while an area is lent to it. It keeps the area as long as the area contains data of the
 * stream: unwritten runs, or part of an FPDU.
 */
struct rk_area *rk_area_new(void);
void rk_area_free(struct rk_area *area);	/* NULL is allowed */
/*
 * Both start a stream: rk_qp_start() without MPA start-up, rk_qp_begin() after a completed MPA
 * start-up. `now` is on the clock of rk_on_time().
 */
int rk_qp_start(struct rk_qp *qp, const struct rk_stream *stream, u64 now);
int rk_qp_begin(struct rk_qp *qp, const struct rk_mpa *mpa, u32 emss, u64 now);

/*
 * MPA start-up. The initiator sends the request. Each side reads rk_mpa_missing() bytes at a time,
 * and passes them to rk_mpa_push(), until the peer's frame is complete. The responder then sends
 * the reply. Frames and private data stay valid until the next call that changes the start-up.
 *
 * The engine enforces the time limits, on the clock of rk_on_time(). Keep a timer for
 * rk_mpa_poll_at(); when it expires, push the bytes that have arrived, then call rk_mpa_on_time().
 */
struct rk_mpa *rk_mpa_new(int initiator, const struct rk_mpa_params *params,
			  const void *private_data, size_t len, u64 now);
void rk_mpa_free(struct rk_mpa *mpa);		/* NULL is allowed */
void rk_mpa_connecting(struct rk_mpa *mpa, u64 now);	/* the TCP connect begins */
size_t rk_mpa_request(const struct rk_mpa *mpa, const u8 **frame);
void rk_mpa_request_sent(struct rk_mpa *mpa, u64 now);
/*
 * Reports that the peer has closed the connection instead of replying, as peers do that do not know
 * MPA revision 2. Returns 0 if a request of an older revision is ready for a new connection.
 */
int rk_mpa_retry(struct rk_mpa *mpa);
int rk_mpa_missing(const struct rk_mpa *mpa);
/*
 * Returns -EAGAIN if the frame is incomplete. If it is complete, stores its contents in `peer`, and
 * returns 0, or -ECONNREFUSED if the peer's program has rejected the connection.
 */
int rk_mpa_push(struct rk_mpa *mpa, const u8 *octets, size_t len, struct rk_mpa_peer *peer);
u64 rk_mpa_poll_at(const struct rk_mpa *mpa);	/* U64_MAX: no limit is running */
int rk_mpa_on_time(struct rk_mpa *mpa, u64 now);	/* -ETIMEDOUT: a limit has expired */
int rk_mpa_accept(struct rk_mpa *mpa, u16 ird, u16 ord, const void *private_data, size_t len,
		  const u8 **frame);
int rk_mpa_reject(struct rk_mpa *mpa, const void *private_data, size_t len, const u8 **frame);

/* Any context. */
int rk_qp_state(const struct rk_qp *qp);
/*
 * Return true if, respectively: the stream is being ended, by either side or by an error; this side
 * was shut down (rk_qp_shutdown_done()); the peer has closed its side (rk_rx_eof()). All return
 * false after rk_qp_stream_gone().
 */
bool rk_qp_is_ending(const struct rk_qp *qp);
bool rk_qp_is_shut_down(const struct rk_qp *qp);
bool rk_qp_peer_has_closed(const struct rk_qp *qp);
/*
 * Adds the queue pair's counters to the totals, in the order of struct Counters: bytes sent and
 * received, FPDUs, messages, bytes of payload, and so on.
 */
void rk_qp_counters(const struct rk_qp *qp, u64 totals[RK_COUNTERS]);
int rk_qp_modify(struct rk_qp *qp, int state);	/* as ib_modify_qp() */
int rk_post_send(struct rk_qp *qp, const struct rk_send *send);
int rk_post_recv(struct rk_qp *qp, u64 wr_id, const struct rk_sge *sges, u32 count);

/*
 * Writes a limited number of completions. After each call that changes the queue pair, call this
 * until it returns false; the lock may be dropped in between.
 */
bool rk_complete_due(struct rk_qp *qp);
/* Returns the events since the last call: RK_EVENT_*, and possibly other bits. */
u32 rk_take_events(struct rk_qp *qp);

/*
 * Times are nanoseconds of a clock that does not go backwards, such as ktime_get_ns(). After each
 * call that changes the queue pair, rk_poll_at() returns when to call rk_on_time() next: RK_NEVER,
 * or a time, which may be in the past.
 */
u64 rk_poll_at(const struct rk_qp *qp);
void rk_on_time(struct rk_qp *qp, u64 now);
/*
 * Reports that the peer has closed the stream while a Send waits for a receive, so that the stream
 * is not read. Call it before rk_on_time().
 */
void rk_sender_closed(struct rk_qp *qp);

/* Areas. Queue pairs of different devices must not share areas. */
void rk_area_lend(struct rk_qp *qp, struct rk_area *area);	/* the queue pair has no area */
bool rk_area_is_lent(const struct rk_qp *qp);
struct rk_area *rk_area_take_back(struct rk_qp *qp);	/* NULL: it keeps its area, or has none */
/*
 * Part of an FPDU can be kept elsewhere: if rk_area_partial() returns its length (0: there is none,
 * or the area contains data to send, too), rk_area_save() moves it to `to`, and the area can be
 * taken back. Before the next call that receives, rk_area_restore() must put it into an area. If
 * `to` is NULL, the bytes are forgotten: the caller must pass them again to rk_rx_input().
 */
size_t rk_area_partial(const struct rk_qp *qp);
void rk_area_save(struct rk_qp *qp, u8 *to);
bool rk_area_restore(struct rk_qp *qp, const u8 *from, size_t len);

/*
 * The functions from here to rk_rx_eof() do nothing without an area, except for rk_rx_interest(),
 * rk_waits_for_memory() and rk_retry_memory().
 *
 * Sending: rk_tx_fill() fills the plan, which is a list of runs: contiguous pieces of memory. Get
 * the runs from rk_tx_runs(), write them to the socket in order, and report with rk_tx_written()
 * how many bytes the socket took. The runs stay valid until then, also without the queue pair's
 * lock, as long as only one context sends.
 */
bool rk_wants_tx(const struct rk_qp *qp);
int rk_tx_fill(struct rk_qp *qp, const struct rk_device *device);
void rk_tx_memory(struct rk_qp *qp, struct rk_device *device);
int rk_tx_runs(struct rk_qp *qp, const struct rk_device *device, const struct kvec **runs);
void rk_tx_written(struct rk_qp *qp, const struct rk_device *device, size_t octets);

/*
 * An invalidation or a fast registration waits while its memory is in use: while a call places data
 * in it or runs refer to it. After rk_tx_written() and after each receiving call below, call
 * rk_take_unused(). If it returns true, call rk_retry_memory() for the waiting queue pairs of the
 * device, then rk_tx_fill(), and rk_rx_filled() with 0 bytes.
 */
bool rk_waits_for_memory(const struct rk_qp *qp);
void rk_retry_memory(struct rk_qp *qp);
bool rk_take_unused(const struct rk_device *device);

int rk_rx_interest(const struct rk_qp *qp);

/*
 * Receiving: get runs from rk_rx_plan(), read from the socket into them in order, and report with
 * rk_rx_filled() how many bytes were read.
 */
int rk_rx_plan(struct rk_qp *qp, const struct rk_device *device, const struct kvec **runs);
int rk_rx_filled(struct rk_qp *qp, const struct rk_device *device, size_t octets);
/*
 * Receives bytes that are in memory, one packet at a time. Complete FPDUs are processed without
 * being copied first. Stores in `taken` how many bytes were consumed. Pass the others again: after
 * RK_RX_HELD when a receive is posted, after RK_RX_WAITS when rk_retry_memory() was called.
 */
int rk_rx_input(struct rk_qp *qp, const struct rk_device *device, const u8 *octets, size_t len,
		size_t *taken);
void rk_rx_eof(struct rk_qp *qp);

/* The end of a stream. */
void rk_qp_close(struct rk_qp *qp);
int rk_qp_wish(const struct rk_qp *qp);
void rk_qp_shutdown_done(struct rk_qp *qp);
/*
 * Reports that the stream is closed, and discards the data in the area. If rk_tx_runs() has
 * returned runs, call rk_tx_written() before, with 0 bytes if none were written.
 */
void rk_qp_stream_gone(struct rk_qp *qp);
void rk_stream_failed(struct rk_qp *qp);

/* Provided by the module. */
void *iwarp_alloc(size_t size, size_t align, bool zeroed);	/* process context only */
void iwarp_free(void *ptr);
void iwarp_panic(const char *text, size_t text_len, const char *file, size_t file_len, u32 line);
u32 iwarp_crc32c(u32 crc, const u8 *octets, size_t len);
/* The engine calls this from within its own functions: it must only store the completion. */
void iwarp_complete(void *owner, int receive, const struct rk_completion *completion);
/*
 * The engine calls this from within its own functions, too. Stores the next receive in `receive`,
 * or returns false if there is none.
 */
bool iwarp_take_receive(void *owner, struct rk_receive *receive);

#endif
