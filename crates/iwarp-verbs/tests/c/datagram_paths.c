/* Tests of the paths of datagrams: traffic class and hop limit, the address for the reply, and
 * multicast loopback. The argument is the face of the devices. */
#include "check.h"
#include <infiniband/verbs.h>

#define QKEY 0x11111111u

enum { GRH = 40, CLASS = 0x48, HOPS = 9 };

static struct ibv_context *context;
static struct ibv_pd *pd;
static struct ibv_mr *mr;
static struct ibv_cq *cq;
static unsigned char memory[4][256];

static void modify(struct ibv_qp *qp, int mask, struct ibv_qp_attr attr)
{
	NEED(ibv_modify_qp(qp, &attr, IBV_QP_STATE | mask) == 0);
}

/* Creates a queue pair in RTS, with creation flags. */
static struct ibv_qp *create_qp(uint32_t flags)
{
	struct ibv_qp_init_attr_ex attr = { .send_cq = cq, .recv_cq = cq, .cap = { 4, 4, 1, 1, 64 },
		.qp_type = IBV_QPT_UD, .pd = pd,
		.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_CREATE_FLAGS, .create_flags = flags };
	struct ibv_qp *qp = ibv_create_qp_ex(context, &attr);

	NEED(qp);
	modify(qp, IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY,
		(struct ibv_qp_attr){ .qp_state = IBV_QPS_INIT, .port_num = 1, .qkey = QKEY });
	modify(qp, 0, (struct ibv_qp_attr){ .qp_state = IBV_QPS_RTR });
	modify(qp, IBV_QP_SQ_PSN, (struct ibv_qp_attr){ .qp_state = IBV_QPS_RTS });
	return qp;
}

static void receive(struct ibv_qp *qp, int slot)
{
	struct ibv_sge sge = { (uintptr_t)memory[slot], sizeof(memory[slot]), mr->lkey };
	struct ibv_recv_wr wr = { .wr_id = slot, .sg_list = &sge, .num_sge = 1 }, *bad;

	NEED(ibv_post_recv(qp, &wr, &bad) == 0);
}

static struct ibv_wc next_completion(void)
{
	struct ibv_wc wc;
	int n;

	do {
		n = ibv_poll_cq(cq, 1, &wc);
	} while (n == 0);
	NEED(n == 1);
	CODE(IBV_WC_SUCCESS, wc.status);
	return wc;
}

static void send(struct ibv_qp *qp, struct ibv_ah *ah, uint32_t to)
{
	struct ibv_sge sge = { (uintptr_t)"way", 3, 0 };
	struct ibv_send_wr wr = { .wr_id = 9, .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND,
		.send_flags = IBV_SEND_INLINE,
		.wr.ud = { .ah = ah, .remote_qpn = to, .remote_qkey = QKEY } }, *bad;

	NEED(ibv_post_send(qp, &wr, &bad) == 0);
}

/* The routing header in the receive matches the sender's address handle. A reply uses the same
 * path, with the RoCE v2 entry as its source. */
static void test_path(int index)
{
	struct ibv_ah_attr attr = { .is_global = 1, .port_num = 1,
		.grh = { .sgid_index = index, .traffic_class = CLASS, .hop_limit = HOPS } }, back;
	struct ibv_qp *qp = create_qp(0);
	union ibv_gid gid;
	struct ibv_ah *ah;
	struct ibv_wc wc;
	unsigned char *header = memory[0];
	int is_v6;

	NEED(ibv_query_gid(context, 1, index, &gid) == 0);
	attr.grh.dgid = gid;
	NEED((ah = ibv_create_ah(pd, &attr)));
	receive(qp, 0);
	send(qp, ah, qp->qp_num);
	wc = next_completion();
	CHECK(wc.byte_len == GRH + 3 && !memcmp(header + GRH, "way", 3));
	is_v6 = header[0] >> 4 == 6;
	CODE(HOPS, is_v6 ? header[7] : header[28]);
	CODE(CLASS, is_v6 ? (uint8_t)(header[0] << 4 | header[1] >> 4) : header[21]);
	CODE(0, ibv_init_ah_from_wc(context, 1, &wc, (struct ibv_grh *)header, &back));
	CODE(CLASS, back.grh.traffic_class);
	CODE(index, back.grh.sgid_index);
	CHECK(back.is_global && back.port_num == 1 && !memcmp(&back.grh.dgid, &gid, 16));
	CODE(0, ibv_destroy_ah(ah));
	CODE(0, ibv_destroy_qp(qp));
}

/* A reply goes to the sender, from the address to which the datagram was sent. If that address is a
 * group, the source is a local address of the same family. */
static void test_reply_address(int index)
{
	union ibv_gid own, peers[2] = { { .raw = { 0x20, 0x01, 0x0d, 0xb8, [15] = 7 } },
		{ .raw = { [10] = 0xff, 0xff, 198, 51, 100, 7 } } },
		groups[2] = { { .raw = { 0xff, 0x0e, [15] = 9 } },
			{ .raw = { [10] = 0xff, 0xff, 239, 255, 77, 22 } } };
	struct ibv_wc wc = { .wc_flags = IBV_WC_GRH };
	int is_v4, to_group;

	NEED(ibv_query_gid(context, 1, index, &own) == 0);
	is_v4 = own.raw[10] == 0xff && own.raw[11] == 0xff;
	for (to_group = 0; to_group < 2; to_group++) {
		union ibv_gid *peer = &peers[is_v4], *to = to_group ? &groups[is_v4] : &own;
		struct ibv_grh header = { .sgid = *peer, .dgid = *to,
			.version_tclass_flow = htobe32(6u << 28 | CLASS << 20 | 0x54321) };
		unsigned char *octets = (unsigned char *)&header;
		struct ibv_ah_attr back;
		struct ibv_ah *ah;

		if (is_v4) {
			memset(octets, 0, sizeof(header));
			octets[20] = 0x45;
			octets[21] = CLASS;
			memcpy(octets + 32, peer->raw + 12, 4);
			memcpy(octets + 36, to->raw + 12, 4);
		}
		CODE(0, ibv_init_ah_from_wc(context, 1, &wc, &header, &back));
		CHECK(!memcmp(&back.grh.dgid, peer, 16));
		CODE(index, back.grh.sgid_index);
		CODE(CLASS, back.grh.traffic_class);
		CODE(is_v4 ? 0 : 0x54321, back.grh.flow_label);
		NEED((ah = ibv_create_ah_from_wc(pd, &wc, &header, 1)));
		CODE(0, ibv_destroy_ah(ah));
	}
}

/* With BLOCK_SELF_MCAST_LB, a queue pair receives multicasts of other queue pairs, but not its
 * own. */
static void test_block_self_multicast(void)
{
	union ibv_gid group = { .raw = { [10] = 0xff, 0xff, 239, 255, 77, 21 } };
	struct ibv_ah_attr attr = { .is_global = 1, .port_num = 1,
		.grh = { .dgid = group, .hop_limit = 1 } };
	struct ibv_qp *blocking = create_qp(IBV_QP_CREATE_BLOCK_SELF_MCAST_LB), *other = create_qp(0);
	struct ibv_ah *ah = ibv_create_ah(pd, &attr);
	struct ibv_wc wc;

	NEED(ah);
	CODE(0, ibv_attach_mcast(blocking, &group, 0));
	receive(blocking, 1);
	send(blocking, ah, 0xffffff);
	send(other, ah, 0xffffff);
	wc = next_completion();
	CHECK(wc.wr_id == 1 && wc.src_qp == other->qp_num);
	CODE(0, ibv_detach_mcast(blocking, &group, 0));
	CODE(0, ibv_destroy_ah(ah));
	CODE(0, ibv_destroy_qp(blocking));
	CODE(0, ibv_destroy_qp(other));
}

/* The event of a drained send queue refers to its queue pair. */
static void test_drained_event(void)
{
	struct ibv_qp *qp = create_qp(0);
	struct ibv_async_event event;

	modify(qp, IBV_QP_EN_SQD_ASYNC_NOTIFY, (struct ibv_qp_attr){ .qp_state = IBV_QPS_SQD,
		.en_sqd_async_notify = 1 });
	NEED(ibv_get_async_event(context, &event) == 0);
	CODE(IBV_EVENT_SQ_DRAINED, event.event_type);
	CHECK(event.element.qp == qp);
	ibv_ack_async_event(&event);
	CODE(0, ibv_destroy_qp(qp));
}

int main(int argc, char **argv)
{
	struct ibv_device **list = ibv_get_device_list(NULL);
	int roce = argc > 1 && strcmp(argv[1], "roce") == 0;

	NEED(list && list[0] && (context = ibv_open_device(list[0])));
	ibv_free_device_list(list);
	NEED((pd = ibv_alloc_pd(context)) && (cq = ibv_create_cq(context, 16, NULL, NULL, 0)));
	NEED((mr = ibv_reg_mr(pd, memory, sizeof(memory), IBV_ACCESS_LOCAL_WRITE)));
	/* A RoCE NIC has each address twice; the second entry is RoCE v2. */
	test_path(roce ? 1 : 0);
	test_path(roce ? 3 : 1);
	test_reply_address(roce ? 1 : 0);
	test_reply_address(roce ? 3 : 1);
	test_block_self_multicast();
	test_drained_event();
	CODE(0, ibv_dereg_mr(mr));
	CODE(0, ibv_destroy_cq(cq));
	CODE(0, ibv_dealloc_pd(pd));
	CODE(0, ibv_close_device(context));
	return result();
}
