//! The tests of rdma-core that are skipped with our library: each by its name, with its exact message, and the reason.
//!
//! A message alone would not do: many tests say the same words when something else is broken.

use super::pyverbs::Reasons;

/// Tests that are skipped with one message.
pub(crate) struct Skip {
    /// All of the message.
    pub(crate) message: &'static str,
    /// What it means.
    pub(crate) reason: &'static str,
    /// The tests: a module and the names in it.
    pub(crate) tests: &'static [(&'static str, &'static [&'static str])],
}

impl Skip {
    /// Returns `true` if it is about this test.
    pub(crate) fn covers(&self, test: &str) -> bool {
        self.tests.iter().any(|(module, names)| {
            let rest = test
                .strip_prefix(module)
                .and_then(|rest| rest.strip_prefix('.'));
            rest.is_some_and(|name| names.contains(&name))
        })
    }
}

/// All of them.
pub(super) const REASONS: Reasons = Reasons::Exact(SKIPS);

const SKIPS: &[Skip] = &[
    Skip {
        message: "Create QP type 8 is not supported",
        reason: RAW_PACKETS,
        tests: &[
            ("test_flow.FlowTest", FLOWS),
            ("test_rss_traffic.RSSTrafficTest", RSS),
        ],
    },
    // An ordinary user is told so before the tests try.
    Skip {
        message: "Must be run by root on Ethernet link layer",
        reason: RAW_PACKETS,
        tests: &[
            ("test_flow.FlowTest", FLOWS),
            ("test_rss_traffic.RSSTrafficTest", RSS),
        ],
    },
    Skip {
        message: "To Create RAW QP must be done by root on Ethernet link layer",
        reason: RAW_PACKETS,
        tests: &[("test_qp.QPTest", RAW_QUEUE_PAIRS)],
    },
    Skip {
        message: "Create Raw Packet QP with attrs is not supported",
        reason: RAW_PACKETS,
        tests: &[("test_qp.QPTest", &["test_create_raw_qp_with_attr"])],
    },
    Skip {
        message: "Create Raw Packet QP with extended attrs is not supported",
        reason: RAW_PACKETS,
        tests: &[("test_qp.QPTest", &["test_create_raw_qp_ex_with_attr"])],
    },
    Skip {
        message: "Create Raw Packet QP without attrs is not supported",
        reason: RAW_PACKETS,
        tests: &[(
            "test_qp.QPTest",
            &["test_create_raw_qp_no_attr", "test_query_raw_qp"],
        )],
    },
    Skip {
        message: "Create Raw Packet QP without extended attrs is not supported",
        reason: RAW_PACKETS,
        tests: &[("test_qp.QPTest", &["test_create_raw_qp_ex_no_attr"])],
    },
    Skip {
        message: "There are no huge pages of size 2M allocated",
        reason: HUGE_PAGES,
        tests: HUGE,
    },
    Skip {
        message: "Huge pages of size 2M is not supported in this platform",
        reason: HUGE_PAGES,
        tests: HUGE,
    },
    Skip {
        message: "Allocating dmabuf is not supported by /dev/dri/renderD128",
        reason: "needs a graphics device",
        tests: &[
            (
                "test_mr.DmaBufMRTest",
                &[
                    "test_dmabuf_dereg_mr",
                    "test_dmabuf_dereg_mr_twice",
                    "test_dmabuf_lkey",
                    "test_dmabuf_read",
                    "test_dmabuf_reg_mr",
                    "test_dmabuf_reg_mr_bad_flags",
                    "test_dmabuf_rkey",
                    "test_dmabuf_write",
                ],
            ),
            (
                "test_mr.DmaBufTestCase",
                &["test_dmabuf_rc_traffic", "test_dmabuf_rdma_traffic"],
            ),
        ],
    },
    Skip {
        message: "cuda-python 12.0+ must be installed to run CUDA tests",
        reason: "needs a graphics device",
        tests: &[(
            "test_cuda_dmabuf.DmabufCudaTest",
            &["test_cuda_dmabuf_rdma_write_traffic"],
        )],
    },
    Skip {
        message: "Device iwarp0 doesn't have net interface",
        reason: "needs /sys/class/infiniband, for which user namespaces are missing",
        tests: &[(
            "test_rdmacm.CMTestCase",
            &[
                "test_rdmacm_async_ex_leave_multicast_traffic",
                "test_rdmacm_async_ex_multicast_traffic",
                "test_rdmacm_async_multicast_traffic",
                "test_rdmacm_async_read",
                "test_rdmacm_async_reject_traffic",
                "test_rdmacm_async_traffic",
                "test_rdmacm_async_traffic_external_qp",
                "test_rdmacm_async_udp_traffic",
                "test_rdmacm_async_write",
                "test_rdmacm_sync_traffic",
            ],
        )],
    },
];

const RAW_PACKETS: &str = "needs raw packets";
const FLOWS: &[&str] = &[
    "test_eth_spec_flow_traffic",
    "test_ipv4_spec_flow_traffic",
    "test_ipv6_spec_flow_traffic",
    "test_tcp_spec_flow_traffic",
    "test_udp_spec_flow_traffic",
];
const RSS: &[&str] = &["test_rss_traffic"];
const RAW_QUEUE_PAIRS: &[&str] = &[
    "test_create_raw_qp_ex_no_attr",
    "test_create_raw_qp_ex_with_attr",
    "test_create_raw_qp_no_attr",
    "test_create_raw_qp_with_attr",
    "test_query_raw_qp",
];

const HUGE_PAGES: &str = "needs huge pages on the machine";
const HUGE: &[(&str, &[&str])] = &[
    (
        "test_odp.OdpTestCase",
        &[
            "test_odp_rc_huge_traffic",
            "test_odp_rc_huge_user_addr_traffic",
        ],
    ),
    (
        "test_parent_domain.ParentDomainTrafficTest",
        &["test_huge_page_traffic"],
    ),
];
