/* Tests of `ibv_modify_qp`: each change from each state, with each attribute missing or added, and
 * with invalid values. A refused change affects neither the state nor the result of `ibv_query_qp`.
 * The argument is the face of the device. */
#include "by_number.h"

enum { STATES = 7, BITS = 21 };

static struct ibv_context *context;
static struct ibv_pd *pd;
static struct ibv_cq *cq;
static int roce;

static const char *const names[STATES] = { "RESET", "INIT", "RTR", "RTS", "SQD", "SQE", "ERR" };

static const char allowed[STATES][STATES + 1] = {
	"11....x", /* From RESET to ERR only on an iWARP NIC, as with siw. */
	"111...1",
	"1..1..1",
	"1..11.1",
	"1..11.1",
	"1..1..1",
	"1.....1",
};

static struct ibv_qp *create_qp(void)
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
static int complete_mask(int from, int to)
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
static void move_through_states(struct ibv_qp *qp, struct ibv_qp *peer, int state)
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

static void expect_unchanged(struct ibv_qp *qp, const struct ibv_qp_attr *before, int from, int to)
{
	struct ibv_qp_attr now = query(qp);

	if (memcmp(before, &now, sizeof(now)) != 0)
		fprintf(stderr, "%s to %s has changed an attribute\n", names[from], names[to]);
	CHECK(memcmp(before, &now, sizeof(now)) == 0);
}

static void test_each_change(void)
{
	int from, to;

	for (from = 0; from < STATES; from++) {
		for (to = 0; to < STATES; to++) {
			struct ibv_qp *qp, *peer;
			struct ibv_qp_attr before;
			char rule = allowed[from][to];
			int ok = rule == '1' || (rule == 'x' && !roce), got;

			/* Only datagram queue pairs have the state SQE. */
			if (from == IBV_QPS_SQE)
				continue;
			qp = create_qp();
			peer = create_qp();
			move_through_states(qp, peer, from);
			before = query(qp);
			/* As with siw, a new queue pair of an iWARP NIC is reported as INIT. */
			CODE(from == IBV_QPS_RESET && !roce ? IBV_QPS_INIT : from, before.qp_state);
			got = move_to(qp, to, peer->qp_num, complete_mask(from, to));
			if (got != (ok ? 0 : EINVAL))
				fprintf(stderr, "%s to %s: %d\n", names[from], names[to], got);
			CODE(ok ? 0 : EINVAL, got);
			if (ok)
				CODE(to, query(qp).qp_state);
			else
				expect_unchanged(qp, &before, from, to);
			NEED(ibv_destroy_qp(qp) == 0 && ibv_destroy_qp(peer) == 0);
		}
	}
}

/* Omits each required attribute of a change, and adds each attribute that is not allowed. On an
 * iWARP NIC, as with siw, only the peer's address and queue pair number are required. */
static void test_each_attribute(int from, int to, int required, int optional)
{
	struct ibv_qp *qp = create_qp(), *peer = create_qp();
	struct ibv_qp_attr before;
	int bit;

	move_through_states(qp, peer, from);
	before = query(qp);
	for (bit = 1; bit < BITS; bit++) {
		int mask = required ^ 1 << bit, missing = required & 1 << bit, is_optional = optional & 1 << bit;
		int peer_bits = missing & (IBV_QP_AV | IBV_QP_DEST_QPN);

		if (is_optional || (missing && !roce && !peer_bits))
			continue;
		if (move_to(qp, to, peer->qp_num, mask) != EINVAL)
			fprintf(stderr, "%s to %s with %#x\n", names[from], names[to], mask);
		CODE(EINVAL, move_to(qp, to, peer->qp_num, mask));
		expect_unchanged(qp, &before, from, to);
	}
	CODE(0, move_to(qp, to, peer->qp_num, required | optional));
	CODE(to, query(qp).qp_state);
	NEED(ibv_destroy_qp(qp) == 0 && ibv_destroy_qp(peer) == 0);
}

static void expect_bad_value(int from, int to, void (*set)(struct ibv_qp_attr *))
{
	struct ibv_qp *qp = create_qp(), *peer = create_qp();
	struct ibv_qp_attr before, attr;

	move_through_states(qp, peer, from);
	before = query(qp);
	attr = attributes(context, to, peer->qp_num);
	set(&attr);
	CODE(EINVAL, ibv_modify_qp(qp, &attr, complete_mask(from, to)));
	expect_unchanged(qp, &before, from, to);
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

static void test_bad_values(void)
{
	expect_bad_value(IBV_QPS_RESET, IBV_QPS_INIT, port_0);
	expect_bad_value(IBV_QPS_RESET, IBV_QPS_INIT, port_2);
	expect_bad_value(IBV_QPS_RESET, IBV_QPS_INIT, pkey_1);
	expect_bad_value(IBV_QPS_RESET, IBV_QPS_INIT, state_7);
	expect_bad_value(IBV_QPS_INIT, IBV_QPS_RTR, path_port_0);
	expect_bad_value(IBV_QPS_INIT, IBV_QPS_RTR, path_port_7);
	expect_bad_value(IBV_QPS_INIT, IBV_QPS_RTR, gid_200);
	expect_bad_value(IBV_QPS_INIT, IBV_QPS_RTR, mtu_0);
	expect_bad_value(IBV_QPS_INIT, IBV_QPS_RTR, mtu_6);
	expect_bad_value(IBV_QPS_INIT, IBV_QPS_RTR, reads_255);
	expect_bad_value(IBV_QPS_RTR, IBV_QPS_RTS, reads_255);
	expect_bad_value(IBV_QPS_RTR, IBV_QPS_RTS, timeout_32);
	expect_bad_value(IBV_QPS_RTR, IBV_QPS_RTS, retry_8);
	expect_bad_value(IBV_QPS_RTR, IBV_QPS_RTS, rnr_retry_8);
}

/* As with hardware, only the low five bits of the RNR timer are used. */
static void test_rnr_timer_mask(void)
{
	struct ibv_qp *qp = create_qp(), *peer = create_qp();
	struct ibv_qp_attr attr;
	int timer;

	for (timer = 30; timer < 256; timer += 33) {
		move_through_states(qp, peer, IBV_QPS_INIT);
		attr = attributes(context, IBV_QPS_RTR, peer->qp_num);
		attr.min_rnr_timer = (uint8_t)timer;
		CODE(0, ibv_modify_qp(qp, &attr, TO_RTR));
		CODE(timer & 31, query(qp).min_rnr_timer);
		CODE(0, move_to(qp, IBV_QPS_RESET, 0, IBV_QP_STATE));
		CODE(0, move_to(peer, IBV_QPS_RESET, 0, IBV_QP_STATE));
	}
	NEED(ibv_destroy_qp(qp) == 0 && ibv_destroy_qp(peer) == 0);
}

/* Changes of attributes without a change of state, in RTS. Some attributes may change, but those of
 * the peer may not. */
static void test_changes_in_rts(void)
{
	struct ibv_qp *qp = create_qp(), *peer = create_qp();
	struct ibv_qp_attr before;
	int bit, changeable = IBV_QP_ACCESS_FLAGS | IBV_QP_MIN_RNR_TIMER | IBV_QP_PATH_MIG_STATE;

	move_through_states(qp, peer, IBV_QPS_RTS);
	before = query(qp);
	CODE(0, move_to(qp, IBV_QPS_RTS, 0, 0));
	for (bit = 1; bit < BITS; bit++) {
		if (changeable & 1 << bit) {
			CODE(0, move_to(qp, IBV_QPS_RTS, 0, 1 << bit));
			before = query(qp);
		} else {
			/* IBV_QP_CUR_STATE is one of these bits: the state that the program passes is wrong. */
			CODE(EINVAL, move_to(qp, IBV_QPS_RTS, 5, 1 << bit));
		}
		expect_unchanged(qp, &before, IBV_QPS_RTS, IBV_QPS_RTS);
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
	test_each_change();
	test_each_attribute(IBV_QPS_RESET, IBV_QPS_INIT, TO_INIT, 0);
	test_each_attribute(IBV_QPS_INIT, IBV_QPS_RTR, TO_RTR, path_rc);
	test_each_attribute(IBV_QPS_RTR, IBV_QPS_RTS, TO_RTS, in_use_rc);
	test_bad_values();
	test_rnr_timer_mask();
	test_changes_in_rts();
	CODE(0, ibv_destroy_cq(cq));
	CODE(0, ibv_dealloc_pd(pd));
	CODE(0, ibv_close_device(context));
	return result();
}
