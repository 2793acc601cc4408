/* `ibv_modify_qp` on a queue pair: each change from each state, with each attribute missing or
 * added, and with invalid values. A refused change affects neither the state nor `ibv_query_qp`.
 * The argument is the face. */
#include "by_number.h"

enum { STATES = 7, BITS = 21 };

static struct ibv_context *context;
static struct ibv_pd *pd;
static struct ibv_cq *cq;
static int roce;

static const char *const name[STATES] = { "RESET", "INIT", "RTR", "RTS", "SQD", "SQE", "ERR" };

static const char allowed[STATES][STATES + 1] = {
	"11....x", /* RESET: to ERR with siw only. */
	"111...1",
	"1..1..1",
	"1..11.1",
	"1..11.1",
	"1..1..1",
	"1.....1",
};

static struct ibv_qp *new_qp(void)
{
	struct ibv_qp_init_attr attr = { .send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC,
		.cap = { .max_send_wr = 4, .max_recv_wr = 4, .max_send_sge = 1, .max_recv_sge = 1 } };
	struct ibv_qp *qp = ibv_create_qp(pd, &attr);

	NEED(qp);
	return qp;
}

static struct ibv_qp_attr query(struct ibv_qp *qp)
{
	struct ibv_qp_init_attr init;
	struct ibv_qp_attr attr;

	NEED(ibv_query_qp(qp, &attr, IBV_QP_STATE, &init) == 0);
	CODE((int)qp->state, (int)attr.qp_state);
	return attr;
}

/* Returns the complete mask of a change between these states. */
static int mask_of(int from, int to)
{
	if (to == IBV_QPS_INIT && from == IBV_QPS_RESET)
		return TO_INIT;
	if (to == IBV_QPS_RTR)
		return TO_RTR;
	if (to == IBV_QPS_RTS && from == IBV_QPS_RTR)
		return TO_RTS;
	return IBV_QP_STATE;
}

/* Moves `qp` to a state, connected to `peer` where the state requires it. */
static void reach(struct ibv_qp *qp, struct ibv_qp *peer, int state)
{
	if (state == IBV_QPS_RESET)
		return;
	NEED(move_to(qp, IBV_QPS_INIT, 0, TO_INIT) == 0 && move_to(peer, IBV_QPS_INIT, 0, TO_INIT) == 0);
	if (state == IBV_QPS_INIT)
		return;
	NEED(move_to(qp, IBV_QPS_RTR, peer->qp_num, TO_RTR) == 0 &&
		move_to(peer, IBV_QPS_RTR, qp->qp_num, TO_RTR) == 0);
	if (state == IBV_QPS_RTR)
		return;
	NEED(move_to(qp, IBV_QPS_RTS, 0, TO_RTS) == 0 && move_to(peer, IBV_QPS_RTS, 0, TO_RTS) == 0);
	if (state != IBV_QPS_RTS)
		NEED(move_to(qp, state, 0, IBV_QP_STATE) == 0);
}

static void same(struct ibv_qp *qp, const struct ibv_qp_attr *before, int from, int to)
{
	struct ibv_qp_attr now = query(qp);

	if (memcmp(before, &now, sizeof(now)) != 0)
		fprintf(stderr, "%s to %s has changed something\n", name[from], name[to]);
	CHECK(memcmp(before, &now, sizeof(now)) == 0);
}

static void each_change(void)
{
	int from, to;

	for (from = 0; from < STATES; from++) {
		for (to = 0; to < STATES; to++) {
			struct ibv_qp *qp, *peer;
			struct ibv_qp_attr before;
			char rule = allowed[from][to];
			int ok = rule == '1' || (rule == 'x' && !roce), got;

			/* SQE is for datagrams. */
			if (from == IBV_QPS_SQE)
				continue;
			qp = new_qp();
			peer = new_qp();
			reach(qp, peer, from);
			before = query(qp);
			/* As with siw, a new queue pair of an iWARP NIC is reported as INIT. */
			CODE(from == IBV_QPS_RESET && !roce ? IBV_QPS_INIT : from, before.qp_state);
			got = move_to(qp, to, peer->qp_num, mask_of(from, to));
			if (got != (ok ? 0 : EINVAL))
				fprintf(stderr, "%s to %s: %d\n", name[from], name[to], got);
			CODE(ok ? 0 : EINVAL, got);
			if (ok)
				CODE(to, query(qp).qp_state);
			else
				same(qp, &before, from, to);
			NEED(ibv_destroy_qp(qp) == 0 && ibv_destroy_qp(peer) == 0);
		}
	}
}

/* Each attribute of a step is omitted, and each other one is added. On an iWARP NIC all but the
 * address and number of a peer may be omitted, because siw needs none. */
static void each_attribute(int from, int to, int whole, int optional)
{
	struct ibv_qp *qp = new_qp(), *peer = new_qp();
	struct ibv_qp_attr before;
	int bit;

	reach(qp, peer, from);
	before = query(qp);
	for (bit = 1; bit < BITS; bit++) {
		int mask = whole ^ 1 << bit, missing = whole & 1 << bit, fits = optional & 1 << bit;
		int peers = missing & (IBV_QP_AV | IBV_QP_DEST_QPN);

		if (fits || (missing && !roce && !peers))
			continue;
		if (move_to(qp, to, peer->qp_num, mask) != EINVAL)
			fprintf(stderr, "%s to %s with %#x\n", name[from], name[to], mask);
		CODE(EINVAL, move_to(qp, to, peer->qp_num, mask));
		same(qp, &before, from, to);
	}
	CODE(0, move_to(qp, to, peer->qp_num, whole | optional));
	CODE(to, query(qp).qp_state);
	NEED(ibv_destroy_qp(qp) == 0 && ibv_destroy_qp(peer) == 0);
}

static void bad_value(int from, int to, void (*set)(struct ibv_qp_attr *))
{
	struct ibv_qp *qp = new_qp(), *peer = new_qp();
	struct ibv_qp_attr before, attr;

	reach(qp, peer, from);
	before = query(qp);
	attr = attributes(context, to, peer->qp_num);
	set(&attr);
	CODE(EINVAL, ibv_modify_qp(qp, &attr, mask_of(from, to)));
	same(qp, &before, from, to);
	NEED(ibv_destroy_qp(qp) == 0 && ibv_destroy_qp(peer) == 0);
}

static void port_0(struct ibv_qp_attr *a) { a->port_num = 0; }
static void port_2(struct ibv_qp_attr *a) { a->port_num = 2; }
static void pkey_1(struct ibv_qp_attr *a) { a->pkey_index = 1; }
static void path_port_0(struct ibv_qp_attr *a) { a->ah_attr.port_num = 0; }
static void path_port_7(struct ibv_qp_attr *a) { a->ah_attr.port_num = 7; }
static void gid_200(struct ibv_qp_attr *a) { a->ah_attr.grh.sgid_index = 200; }
static void mtu_0(struct ibv_qp_attr *a) { a->path_mtu = 0; }
static void mtu_6(struct ibv_qp_attr *a) { a->path_mtu = 6; }
static void reads_255(struct ibv_qp_attr *a) { a->max_rd_atomic = a->max_dest_rd_atomic = 255; }
static void timeout_32(struct ibv_qp_attr *a) { a->timeout = 32; }
static void retry_8(struct ibv_qp_attr *a) { a->retry_cnt = 8; }
static void rnr_retry_8(struct ibv_qp_attr *a) { a->rnr_retry = 8; }
static void state_7(struct ibv_qp_attr *a) { a->qp_state = 7; }

static void each_value(void)
{
	bad_value(IBV_QPS_RESET, IBV_QPS_INIT, port_0);
	bad_value(IBV_QPS_RESET, IBV_QPS_INIT, port_2);
	bad_value(IBV_QPS_RESET, IBV_QPS_INIT, pkey_1);
	bad_value(IBV_QPS_RESET, IBV_QPS_INIT, state_7);
	bad_value(IBV_QPS_INIT, IBV_QPS_RTR, path_port_0);
	bad_value(IBV_QPS_INIT, IBV_QPS_RTR, path_port_7);
	bad_value(IBV_QPS_INIT, IBV_QPS_RTR, gid_200);
	bad_value(IBV_QPS_INIT, IBV_QPS_RTR, mtu_0);
	bad_value(IBV_QPS_INIT, IBV_QPS_RTR, mtu_6);
	bad_value(IBV_QPS_INIT, IBV_QPS_RTR, reads_255);
	bad_value(IBV_QPS_RTR, IBV_QPS_RTS, reads_255);
	bad_value(IBV_QPS_RTR, IBV_QPS_RTS, timeout_32);
	bad_value(IBV_QPS_RTR, IBV_QPS_RTS, retry_8);
	bad_value(IBV_QPS_RTR, IBV_QPS_RTS, rnr_retry_8);
}

/* Hardware reads five bits. */
static void timer_is_masked(void)
{
	struct ibv_qp *qp = new_qp(), *peer = new_qp();
	struct ibv_qp_attr attr;
	int timer;

	for (timer = 30; timer < 256; timer += 33) {
		reach(qp, peer, IBV_QPS_INIT);
		attr = attributes(context, IBV_QPS_RTR, peer->qp_num);
		attr.min_rnr_timer = (uint8_t)timer;
		CODE(0, ibv_modify_qp(qp, &attr, TO_RTR));
		CODE(timer & 31, query(qp).min_rnr_timer);
		CODE(0, move_to(qp, IBV_QPS_RESET, 0, IBV_QP_STATE));
		CODE(0, move_to(peer, IBV_QPS_RESET, 0, IBV_QP_STATE));
	}
	NEED(ibv_destroy_qp(qp) == 0 && ibv_destroy_qp(peer) == 0);
}

/* Attributes alone, in RTS: some may change, but the peer may not. */
static void in_use(void)
{
	struct ibv_qp *qp = new_qp(), *peer = new_qp();
	struct ibv_qp_attr before;
	int bit, open = IBV_QP_ACCESS_FLAGS | IBV_QP_MIN_RNR_TIMER | IBV_QP_PATH_MIG_STATE;

	reach(qp, peer, IBV_QPS_RTS);
	before = query(qp);
	CODE(0, move_to(qp, IBV_QPS_RTS, 0, 0));
	for (bit = 1; bit < BITS; bit++) {
		if (open & 1 << bit) {
			CODE(0, move_to(qp, IBV_QPS_RTS, 0, 1 << bit));
			before = query(qp);
		} else {
			/* The current state that the program passes must be right. */
			CODE(EINVAL, move_to(qp, IBV_QPS_RTS, 5, 1 << bit));
		}
		same(qp, &before, IBV_QPS_RTS, IBV_QPS_RTS);
	}
	CODE(EOPNOTSUPP, move_to(qp, IBV_QPS_RTS, 0, 1 << 24));
	CODE(EOPNOTSUPP, move_to(qp, IBV_QPS_RTS, 0, IBV_QP_RATE_LIMIT));
	NEED(ibv_destroy_qp(qp) == 0 && ibv_destroy_qp(peer) == 0);
}

int main(int argc, char **argv)
{
	int in_use_rc = IBV_QP_ACCESS_FLAGS | IBV_QP_MIN_RNR_TIMER | IBV_QP_PATH_MIG_STATE;
	int path_rc = IBV_QP_ACCESS_FLAGS | IBV_QP_PKEY_INDEX;

	roce = argc > 1 && strcmp(argv[1], "roce") == 0;
	context = open_first();
	pd = ibv_alloc_pd(context);
	cq = ibv_create_cq(context, 64, NULL, NULL, 0);
	NEED(pd && cq);
	each_change();
	each_attribute(IBV_QPS_RESET, IBV_QPS_INIT, TO_INIT, 0);
	each_attribute(IBV_QPS_INIT, IBV_QPS_RTR, TO_RTR, path_rc);
	each_attribute(IBV_QPS_RTR, IBV_QPS_RTS, TO_RTS, in_use_rc);
	each_value();
	timer_is_masked();
	in_use();
	CODE(0, ibv_destroy_cq(cq));
	CODE(0, ibv_dealloc_pd(pd));
	CODE(0, ibv_close_device(context));
	return result();
}
